"""Which files and optimiser states stay: by the versions' states, never by their numbers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from store.version_queries import OnceServed, RollbackTargets
from store.versions import PolicyState, PolicyVersion
from trainer.publishing.cleaning import (
    SPARSE,
    kept_files,
    kept_states,
    leftovers,
    old_states,
    spaced,
)

NOTHING = RollbackTargets(before=0, served=())


def version(number: int, state: PolicyState, *, deleted: bool = False) -> PolicyVersion:
    return PolicyVersion(
        name="m",
        version=number,
        state=state,
        served_name=f"m@{number}",
        adapter_path=f"/a/{number}",
        update_id=None,
        files_deleted=deleted,
    )


def back(before: int, *served: int) -> RollbackTargets:
    """What a roll-back may go back to; `served` had the traffic one after the other, last first."""
    return RollbackTargets(
        before=before,
        served=[OnceServed(version=one, place=at) for at, one in enumerate(served, 2)],
    )


@given(st.lists(st.booleans(), max_size=300))
def test_a_roll_back_goes_at_most_twice_as_far_as_it_must(serves: list[bool]) -> None:
    """Whichever versions got the traffic, and however often what is not needed was deleted."""
    there: list[int] = []
    most = 0
    for now, served in enumerate(serves):
        there = [now, *there] if served else there
        places = [OnceServed(version=one, place=now - one + 2) for one in there]
        there = sorted(spaced(places), reverse=True)
        most = max(most, len(there))
        for younger, older in pairwise(there):
            between = [one for one in range(older + 1, younger) if serves[one]]
            assert not between or now - older + 2 <= SPARSE * (now - younger + 2)
    assert most <= 20
    assert not there or there[-1] == serves.index(True)


def test_training_may_go_on_from_what_is_tried_or_waits_for_it() -> None:
    states: list[PolicyState] = ["published", "serving", "canary", "candidate", "written"]
    versions = [version(number, state) for number, state in enumerate(states)]
    assert kept_states(versions, NOTHING) == {0, 1, 2, 3, 4}
    assert kept_files(versions, NOTHING) == {0, 1, 2, 3, 4}


def test_a_folder_that_no_update_recorded_goes_once_its_number_is_passed() -> None:
    versions = [version(0, "published"), version(3, "serving")]
    assert leftovers(versions, [1, 2, 3, 4]) == [1, 2]
    assert old_states(versions, NOTHING, [3, 4]) == []


def test_folder_that_is_marked_as_deleted_goes() -> None:
    versions = [version(1, "retired", deleted=True), version(2, "serving")]
    assert leftovers(versions, [1, 2]) == [1]


states = st.lists(st.sampled_from(["written", "published", "retired", "rejected"]), max_size=12)


@given(states, st.integers(0, 12))
def test_no_state_is_kept_without_its_files_and_nothing_in_use_goes(
    others: list[PolicyState], serving: int
) -> None:
    versions = [version(number, state) for number, state in enumerate(others)]
    versions.append(version(len(others) + serving, "serving"))
    retired = [one.version for one in reversed(versions) if one.state == "retired"]
    to = back(retired[0] if retired else 0, *retired)
    assert kept_states(versions, to) <= kept_files(versions, to)
    assert not set(leftovers(versions, range(20))) & kept_files(versions, to)
    # At most what is in use, and one more.
    in_use = {one.version for one in versions if one.state in ("written", "serving", "published")}
    assert len(kept_files(versions, to) - in_use) <= 1
