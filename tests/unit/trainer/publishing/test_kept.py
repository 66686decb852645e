"""Which files and optimiser states stay: by the versions' states, never by their numbers."""

from uuid import UUID

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from store.versions import PolicyState, PolicyVersion
from trainer.publishing.kept import kept_files, kept_states, last_good, leftovers, old_states


def version(
    number: int, state: PolicyState, *, deleted: bool = False, rebuilt: bool = False
) -> PolicyVersion:
    return PolicyVersion(
        name="m",
        version=number,
        state=state,
        served_name=f"m@{number}",
        adapter_path=f"/a/{number}",
        update_id=None,
        files_deleted=deleted,
        rebuilt_from=UUID(int=number) if rebuilt else None,
    )


def test_ten_rejections_in_a_row_leave_the_head_and_the_last_good_one() -> None:
    versions = [
        version(0, "published"),
        version(1, "retired"),
        version(2, "retired"),
        version(3, "published"),
        version(4, "serving"),
        *(version(number, "rejected") for number in range(5, 15)),
    ]
    assert last_good(versions) == 3
    assert kept_states(versions) == {3, 4}
    assert kept_files(versions) == {0, 3, 4}
    assert old_states(versions, range(1, 15)) == [1, 2, *range(5, 15)]


def test_a_rebuild_that_was_stopped_keeps_what_it_goes_on_from() -> None:
    versions = [
        version(3, "serving"),
        *(version(number, "rejected", rebuilt=True) for number in (4, 5, 6)),
        version(7, "rejected"),
    ]
    assert kept_states(versions) == kept_files(versions) == {3, 6}
    ended = [*versions, version(8, "serving", rebuilt=True)]
    assert 6 not in kept_states(ended) | kept_files(ended)


def test_the_last_good_one_had_the_traffic_before() -> None:
    # Version 5 was rolled back: 3 serves again, and what it had taken over from is 2.
    versions = [version(0, "published"), version(2, "retired"), version(3, "serving")]
    assert last_good([*versions, version(4, "rejected"), version(5, "retired")]) == 2


def test_a_canary_that_made_way_before_it_served_is_no_version_to_go_back_to() -> None:
    made_way = [
        msgspec.structs.replace(version(number, state), share=0.1)
        for number, state in enumerate(("published", "retired"), 2)  # type: ignore[arg-type]
    ]
    versions = [version(0, "published"), version(1, "retired"), *made_way, version(4, "serving")]
    assert last_good(versions) == 1


def test_what_was_rolled_back_is_no_version_to_go_back_to() -> None:
    lost = msgspec.structs.replace(version(3, "retired"), rolled_back=True)
    versions = [version(0, "published"), version(2, "retired"), lost, version(4, "serving")]
    assert last_good(versions) == 2
    assert kept_files(versions) == {0, 2, 4}


def test_training_may_go_on_from_what_is_tried_or_waits_for_it() -> None:
    states: list[PolicyState] = ["published", "serving", "canary", "candidate", "written"]
    versions = [version(number, state) for number, state in enumerate(states)]
    assert kept_states(versions) == {0, 1, 2, 3, 4}
    assert kept_files(versions) == {0, 1, 2, 3, 4}


def test_a_folder_that_no_update_recorded_goes_once_its_number_is_passed() -> None:
    versions = [version(0, "published"), version(3, "serving")]
    assert leftovers(versions, [1, 2, 3, 4]) == [1, 2]
    assert old_states(versions, [3, 4]) == []


def test_what_is_marked_goes() -> None:
    versions = [version(1, "retired", deleted=True), version(2, "serving")]
    assert leftovers(versions, [1, 2]) == [1]


states = st.lists(st.sampled_from(["written", "published", "retired", "rejected"]), max_size=12)


@given(states, st.integers(0, 12))
def test_no_state_is_kept_without_its_files_and_nothing_in_use_goes(
    others: list[PolicyState], serving: int
) -> None:
    versions = [version(number, state) for number, state in enumerate(others)]
    versions.append(version(len(others) + serving, "serving"))
    assert kept_states(versions) <= kept_files(versions)
    assert not set(leftovers(versions, range(20))) & kept_files(versions)
    # At most what is in use, and one more.
    in_use = {one.version for one in versions if one.state in ("written", "serving", "published")}
    assert len(kept_files(versions) - in_use) <= 1
