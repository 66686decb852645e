"""Arms: each gets its share of new episodes, on every proxy alike, and episodes keep theirs."""

from math import sqrt
from random import Random
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.policies.versions import Arms, Serving, Versions, arms_of, fraction
from store.policy_table import parse_policies
from store.records import ARMS, EVAL, Arm
from store.versions import PolicyState, PolicyVersion
from tests.support.proxy.versions import numbered, version

EPISODES: Final = [f"episode-{number}" for number in range(20_000)]
# A share of N episodes is within so many standard deviations of the binomial.
SIGMAS: Final = 4.5
SHARES = st.floats(min_value=0.0, max_value=1.0)
NAMES = st.text(max_size=30)


def trying(share: float = 0.1, base_share: float = 0.02) -> list[PolicyVersion]:
    """Version 2 serves, and 3 is tried."""
    return [
        version(0, "published", share=base_share),
        version(1, "published"),
        version(2, "serving"),
        version(3, "canary", share=share),
    ]


ENDS: Final[dict[str, list[PolicyVersion]]] = {
    "promoted": [
        version(0, "published", share=0.02),
        version(1, "published"),
        version(2, "published"),
        version(3, "serving"),
    ],
    "rolled_back": [
        version(0, "published", share=0.02),
        version(1, "published"),
        version(2, "serving"),
        version(3, "rolled_back", share=0.1),
    ],
    # A newer one was promoted by hand.
    "made way": [
        version(0, "published", share=0.02),
        version(1, "published"),
        version(2, "published"),
        version(3, "published", share=0.1),
        version(4, "serving"),
    ],
}
SERVES: Final = {"promoted": 3, "rolled_back": 2, "made way": 4}


def given_to(versions: Versions, episodes: list[str]) -> dict[str, tuple[int | None, Arm | None]]:
    """What each of these gets, by its name."""
    found = {one: versions.resolve("m", one) for one in episodes}
    return {one: (serving.version, serving.arm) for one, serving in found.items()}


@pytest.mark.parametrize("canary", [3, 4, 5])
@pytest.mark.parametrize(("share", "base_share"), [(0.1, 0.02), (0.5, 0.0), (0.01, 0.3)])
def test_each_arm_gets_its_share_of_new_episodes(
    canary: int, share: float, base_share: float
) -> None:
    arms = Arms("m", 2, canary, share, base_share, frozenset({canary}))
    drawn = [arms.of_new(one) for one in EPISODES]
    for arm, wanted in (("canary", share), ("base", base_share)):
        spread = sqrt(len(EPISODES) * wanted * (1 - wanted))
        assert abs(drawn.count(arm) - len(EPISODES) * wanted) <= SIGMAS * spread, arm


@given(st.integers(min_value=0, max_value=9), SHARES, SHARES, NAMES)
def test_episode_of_an_arm_gets_its_version_which_tells_the_arm(
    serving: int, share: float, base_share: float, episode: str
) -> None:
    arms = Arms("m", serving, 10, share, base_share, frozenset({10}))
    arm = arms.of_new(episode)
    assert arms.of_version(arms.version_of(arm)) == arm
    assert 0.0 <= fraction("m", 10, episode) < 1.0


@given(st.sampled_from(["m", "n"]), SHARES, SHARES, NAMES)
def test_a_greater_share_takes_none_away(
    policy: str, one: float, other: float, episode: str
) -> None:
    less, more = sorted((one, other))
    if Arms(policy, 2, 3, less, 0.0).of_new(episode) == "canary":
        assert Arms(policy, 2, 3, more, 0.0).of_new(episode) == "canary"


def test_one_canary_is_tried_on_other_episodes_than_the_next() -> None:
    both = [
        one
        for one in EPISODES
        if all(Arms("m", 2, canary, 0.1, 0.0).of_new(one) == "canary" for canary in (3, 4))
    ]
    assert abs(len(both) - 0.01 * len(EPISODES)) <= SIGMAS * sqrt(0.01 * len(EPISODES))


def test_without_shares_all_are_served_by_what_serves() -> None:
    arms = arms_of(numbered("published", "retired", "serving"))
    assert {arms["m"].of_new(one) for one in EPISODES[:100]} == {"serving"}
    assert arms["m"].of_version(0) == "serving"


def test_while_the_base_serves_it_is_no_arm_of_its_own() -> None:
    arms = arms_of([version(0, "serving", share=0.5), version(1, "canary", share=0.2)])["m"]
    drawn = {arms.of_new(one) for one in EPISODES[:1000]}
    assert drawn == {"serving", "canary"}
    assert arms.of_version(0) == "serving"


@given(st.integers(), st.lists(NAMES, max_size=20))
def test_all_proxies_give_an_episode_the_same(seed: int, episodes: list[str]) -> None:
    here = trying(0.4, 0.3)
    there = Random(seed).sample(here, len(here))
    names = sorted(set(episodes))
    assert given_to(Versions(here), names) == given_to(Versions(there), names[::-1])


@pytest.mark.parametrize("end", ENDS)
def test_episodes_keep_what_they_have_when_the_canary_ends(end: str) -> None:
    versions = Versions(numbered("published", "published", "serving"))
    old = given_to(versions, EPISODES[:500])
    versions.replace(trying())
    assert given_to(versions, EPISODES[:500]) == old
    new = given_to(versions, EPISODES[500:3000])
    assert {arm for _, arm in new.values()} == set(ARMS)
    versions.replace(ENDS[end])
    for episodes in (old, new):
        kept = given_to(versions, list(episodes))
        assert {one: kept[one][0] for one in kept} == {one: episodes[one][0] for one in episodes}
    if end != "promoted":
        assert given_to(versions, list(new)) == new
    # Nobody new gets what was rolled back, and nobody is without an arm.
    later = given_to(versions, EPISODES[3000:6000])
    assert {arm for _, arm in later.values()} == {"base", "serving"}
    assert {number for number, _ in later.values()} == {0, SERVES[end]}


def test_a_forgotten_episode_goes_on_with_what_it_had_once_the_canary_serves() -> None:
    before = given_to(Versions(trying()), EPISODES[:3000])
    after = given_to(Versions(ENDS["promoted"]), EPISODES[:3000])
    for one, (number, arm) in before.items():
        if arm in ("base", "canary"):
            assert after[one][0] == number


def test_an_episode_that_had_to_leave_its_version_is_nothing_to_try_another_on() -> None:
    versions = Versions(numbered("published", "serving"))
    given_to(versions, EPISODES[:500])
    retired = [one if one.version != 1 else version(1, "retired") for one in trying(0.9, 0.1)]
    versions.replace(retired)
    assert set(given_to(versions, EPISODES[:500]).values()) == {(2, "serving")}


def test_evaluation_and_a_version_that_is_named_are_in_no_arm() -> None:
    versions = Versions(trying(0.6, 0.4))
    for one in EPISODES[:50]:
        assert versions.resolve("m", one, split=EVAL) == Serving("m", 2, "m@2")
        assert versions.resolve("m@3", one) == Serving("m", 3, "m@3")
        assert versions.resolve("m@0", one) == Serving("m", 0, "m")


@pytest.mark.parametrize("state", ["candidate", "ready", "written", "rejected"])
def test_version_without_traffic_gets_no_episode(state: PolicyState) -> None:
    versions = Versions(
        [version(0, "published"), version(1, "serving"), version(2, state, share=1.0)]
    )
    assert set(given_to(versions, EPISODES[:50]).values()) == {(1, "serving")}


def test_a_policy_that_goes_live_with_another_is_tried_in_its_share_too() -> None:
    table = parse_policies(
        "".join(
            f'[[policy]]\nname = "{name}"\nbase = "m"\nagents = ["{name}"]\n'
            f'publish_with = ["{other}"]\n'
            for name, other in (("a", "b"), ("b", "a"))
        ),
        "file",
    )
    stored = [one for name in "ab" for one in numbered("published", "serving", name=name, base="m")]
    stored.append(version(2, "canary", "b", "m", share=0.3))
    versions = Versions(stored, table)
    arms = arms_of(stored)["b"]
    for one in EPISODES[:300]:
        versions.resolve("m", one, "a")
        assert versions.resolve("m", one, "b").arm == arms.of_new(one)
