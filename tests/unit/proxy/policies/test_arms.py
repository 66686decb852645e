"""Arms: each gets its share of new episodes, on every proxy alike, and episodes keep theirs."""

from math import sqrt
from random import Random
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.policies.versions import Arms, ServedVersion, Versions, arms_of, episode_fraction
from store.policy_table import parse_policies
from store.records import ARMS, EVAL, Arm
from store.versions import PolicyState, PolicyVersion
from tests.support.proxy.versions import numbered, version

EPISODES: Final = [f"episode-{number}" for number in range(20_000)]
# A share of N episodes is within so many standard deviations of the binomial.
SIGMAS: Final = 4.5
SHARES = st.floats(min_value=0.0, max_value=1.0)
NAMES = st.text(max_size=30)


def trying(share: float = 0.1, control_share: float = 0.02) -> list[PolicyVersion]:
    """Version 2 serves, 3 is tried, and 1 is the control."""
    return [
        version(0, "retired"),
        version(1, "retired", share=control_share),
        version(2, "serving"),
        version(3, "canary", share=share),
    ]


CONTROL: Final = [version(0, "retired"), version(1, "retired", share=0.02)]
# The versions after the trial, and the one that new episodes get.
ENDS: Final[dict[str, tuple[list[PolicyVersion], int]]] = {
    "promoted": ([*CONTROL, version(2, "retired"), version(3, "serving")], 3),
    "rolled back": ([*CONTROL, version(2, "serving"), version(3, "rolled_back")], 2),
    "retired": ([*CONTROL, version(2, "serving"), version(3, "retired")], 2),
}


def given_to(versions: Versions, episodes: list[str]) -> dict[str, tuple[int | None, Arm | None]]:
    """What each of these gets, by its name."""
    found = {one: versions.resolve("m", one) for one in episodes}
    return {one: (serving.version, serving.arm) for one, serving in found.items()}


@pytest.mark.parametrize("canary", [3, 4, 5])
@pytest.mark.parametrize(("share", "control_share"), [(0.1, 0.02), (0.5, 0.0), (0.01, 0.3)])
def test_each_arm_gets_its_share_of_new_episodes(
    canary: int, share: float, control_share: float
) -> None:
    arms = Arms("m", 2, canary, share, 1, control_share)
    drawn = [arms.arm_of_new_episode(one) for one in EPISODES]
    for arm, wanted in (("canary", share), ("control", control_share)):
        spread = sqrt(len(EPISODES) * wanted * (1 - wanted))
        assert abs(drawn.count(arm) - len(EPISODES) * wanted) <= SIGMAS * spread, arm


@given(st.integers(min_value=1, max_value=9), SHARES, SHARES, NAMES)
def test_arm_of_an_episode_follows_from_its_version(
    serving: int, share: float, control_share: float, episode: str
) -> None:
    arms = Arms("m", serving, 10, share, 0, control_share)
    arm = arms.arm_of_new_episode(episode)
    assert arms.arm_of_version(arms.version_of(arm)) == arm
    assert 0.0 <= episode_fraction("m", 10, episode) < 1.0


@given(st.sampled_from(["m", "n"]), SHARES, SHARES, NAMES)
def test_larger_share_keeps_the_canarys_episodes(
    policy: str, one: float, other: float, episode: str
) -> None:
    less, more = sorted((one, other))
    if Arms(policy, 2, 3, less).arm_of_new_episode(episode) == "canary":
        assert Arms(policy, 2, 3, more).arm_of_new_episode(episode) == "canary"


def test_successive_canaries_are_tried_on_independent_episodes() -> None:
    both = [
        one
        for one in EPISODES
        if all(Arms("m", 2, canary, 0.1).arm_of_new_episode(one) == "canary" for canary in (3, 4))
    ]
    assert abs(len(both) - 0.01 * len(EPISODES)) <= SIGMAS * sqrt(0.01 * len(EPISODES))


def test_all_episodes_get_the_serving_version_without_shares() -> None:
    arms = arms_of(numbered("retired", "unloaded", "serving"))
    assert {arms["m"].arm_of_new_episode(one) for one in EPISODES[:100]} == {"serving"}
    assert arms["m"].arm_of_version(0) == "serving"


def test_version_in_another_state_or_unloaded_serves_no_episodes_as_control() -> None:
    for state in ("unloaded", "rolled_back", "loaded", "written"):
        arms = arms_of([version(0, "serving"), version(1, state, share=0.5)])["m"]
        assert {arms.arm_of_new_episode(one) for one in EPISODES[:100]} == {"serving"}


@given(st.integers(), st.lists(NAMES, max_size=20))
def test_all_proxies_give_an_episode_the_same_version(seed: int, episodes: list[str]) -> None:
    here = trying(0.4, 0.3)
    there = Random(seed).sample(here, len(here))
    names = sorted(set(episodes))
    assert given_to(Versions(here), names) == given_to(Versions(there), names[::-1])


@pytest.mark.parametrize("end", ENDS)
def test_episodes_keep_their_version_when_the_canary_ends(end: str) -> None:
    versions = Versions(numbered("retired", "retired", "serving"))
    old = given_to(versions, EPISODES[:500])
    versions.replace(trying())
    assert given_to(versions, EPISODES[:500]) == old
    new = given_to(versions, EPISODES[500:3000])
    assert {arm for _, arm in new.values()} == set(ARMS)
    after, serves = ENDS[end]
    versions.replace(after)
    for episodes in (old, new):
        kept = given_to(versions, list(episodes))
        assert {one: kept[one][0] for one in kept} == {one: episodes[one][0] for one in episodes}
    # Nobody new gets what is no canary any more.
    later = given_to(versions, EPISODES[3000:6000])
    assert set(later.values()) == {(1, "control"), (serves, "serving")}


def test_forgotten_episode_keeps_its_version_once_the_canary_serves() -> None:
    before = given_to(Versions(trying()), EPISODES[:3000])
    after = given_to(Versions(ENDS["promoted"][0]), EPISODES[:3000])
    for one, (number, arm) in before.items():
        if arm in ("control", "canary"):
            assert after[one][0] == number


def test_episode_that_lost_its_version_gets_no_canary() -> None:
    versions = Versions(numbered("serving", "retired"))
    given_to(versions, EPISODES[:500])
    versions.replace(trying(0.9, 0.1)[1:])
    assert set(given_to(versions, EPISODES[:500]).values()) == {(2, "serving")}


def test_evaluation_and_calls_for_a_named_version_are_in_no_arm() -> None:
    versions = Versions(trying(0.6, 0.4))
    for one in EPISODES[:50]:
        assert versions.resolve("m", one, split=EVAL) == ServedVersion("m", 2, "m@2")
        assert versions.resolve("m@3", one) == ServedVersion("m", 3, "m@3")
        assert versions.resolve("m@0", one) == ServedVersion("m", 0, "m")


@pytest.mark.parametrize("state", ["loaded", "written", "rejected"])
def test_version_without_traffic_gets_no_episode(state: PolicyState) -> None:
    versions = Versions(
        [version(0, "retired"), version(1, "serving"), version(2, state, share=1.0)]
    )
    assert set(given_to(versions, EPISODES[:50]).values()) == {(1, "serving")}


def test_canary_share_holds_for_policies_that_go_live_together() -> None:
    table = parse_policies(
        "".join(
            f'[[policy]]\nname = "{name}"\nbase = "m"\nagents = ["{name}"]\n'
            f'publish_with = ["{other}"]\n'
            for name, other in (("a", "b"), ("b", "a"))
        ),
        "file",
    )
    stored = [one for name in "ab" for one in numbered("retired", "serving", name=name, base="m")]
    stored.append(version(2, "canary", "b", "m", share=0.3))
    versions = Versions(stored, table)
    arms = arms_of(stored)["b"]
    for one in EPISODES[:300]:
        versions.resolve("m", one, "a")
        assert versions.resolve("m", one, "b").arm == arms.arm_of_new_episode(one)
