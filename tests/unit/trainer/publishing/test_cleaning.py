"""Which files stay of what once served, and which folders have no reader left."""

from store.versions import PolicyState, PolicyVersion
from trainer.publishing.cleaning import leftover_folders


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


def test_unrecorded_version_folder_is_removed_once_a_newer_version_exists() -> None:
    versions = [version(0, "retired"), version(3, "serving")]
    assert leftover_folders(versions, [1, 2, 3, 4]) == [1, 2]


def test_folder_of_a_version_marked_as_deleted_is_removed() -> None:
    versions = [version(1, "retired", deleted=True), version(2, "serving")]
    assert leftover_folders(versions, [1, 2]) == [1]
