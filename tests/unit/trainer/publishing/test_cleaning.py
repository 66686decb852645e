"""Which files stay of what once served, and which folders have no reader left."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from store.version_queries import SPARSE, spaced
from store.versions import PolicyState, PolicyVersion
from trainer.publishing.cleaning import leftovers


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


@given(st.lists(st.booleans(), max_size=300))
def test_going_back_goes_at_most_twice_as_far_as_it_must(serves: list[bool]) -> None:
    """Whichever versions stayed good, and however often what is not needed was deleted."""
    there: list[int] = []
    most = 0
    for now, served in enumerate(serves):
        there = [now, *there] if served else there
        there = sorted(spaced([(one, now - one + 2) for one in there]), reverse=True)
        most = max(most, len(there))
        for younger, older in pairwise(there):
            between = [one for one in range(older + 1, younger) if serves[one]]
            assert not between or now - older + 2 <= SPARSE * (now - younger + 2)
    assert most <= 20
    assert not there or there[-1] == serves.index(True)


def test_a_folder_that_no_update_recorded_goes_once_its_number_is_passed() -> None:
    versions = [version(0, "retired"), version(3, "serving")]
    assert leftovers(versions, [1, 2, 3, 4]) == [1, 2]


def test_folder_that_is_marked_as_deleted_goes() -> None:
    versions = [version(1, "retired", deleted=True), version(2, "serving")]
    assert leftovers(versions, [1, 2]) == [1]
