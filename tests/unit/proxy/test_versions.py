"""Routing: a policy's name gets the serving version, an episode keeps the one it began with."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.policies.versions import Serving, Versions
from store.records import PolicyState, PolicyVersion


def version(number: int, state: PolicyState) -> PolicyVersion:
    return PolicyVersion(
        name="m",
        version=number,
        state=state,
        served_name="m" if number == 0 else f"m@{number}",
        adapter_path=None,
        update_id=None,
    )


def test_an_unknown_name_goes_through_as_it_is() -> None:
    assert Versions().resolve("gpt-x", "e") == Serving(None, None, "gpt-x")
    assert Versions().resolve(None, "e") == Serving(None, None, None)


def test_new_episodes_get_the_serving_version_and_old_ones_keep_theirs() -> None:
    versions = Versions([version(0, "serving")])
    assert versions.resolve("m", "old") == Serving("m", 0, "m")
    versions.replace([version(0, "published"), version(1, "serving")])
    assert versions.resolve("m", "new") == Serving("m", 1, "m@1")
    assert versions.resolve("m", "old") == Serving("m", 0, "m")


def test_a_retired_version_is_left_for_the_serving_one() -> None:
    versions = Versions([version(0, "published"), version(1, "serving")])
    versions.resolve("m", "e")
    versions.replace([version(0, "published"), version(1, "retired"), version(2, "serving")])
    assert versions.resolve("m", "e").version == 2


def test_a_version_can_be_asked_for_by_its_own_name() -> None:
    versions = Versions([version(0, "published"), version(1, "published"), version(2, "serving")])
    assert versions.resolve("m@1", "e") == Serving("m", 1, "m@1")


def test_a_pin_from_an_earlier_process_stands() -> None:
    versions = Versions([version(0, "published"), version(1, "serving")])
    versions.pin("m", "e", 0)
    assert versions.resolve("m", "e").version == 0


@given(st.lists(st.integers(1, 6), max_size=30), st.lists(st.text(max_size=2), max_size=30))
def test_an_episode_never_changes_its_version(swaps: list[int], episodes: list[str]) -> None:
    versions = Versions([version(0, "serving")])
    seen: dict[str, int | None] = {}
    everything = [version(number, "published") for number in range(7)]
    for index, episode in enumerate(episodes):
        if index < len(swaps):
            now = swaps[index]
            versions.replace(
                [v if v.version != now else version(now, "serving") for v in everything]
            )
        found = versions.resolve("m", episode).version
        assert seen.setdefault(episode, found) == found
