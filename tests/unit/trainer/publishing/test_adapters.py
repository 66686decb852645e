"""A version's files: whole or not there, never changed, and copied out as they were written."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from store.claims import Outcome
from store.ids import new_id
from store.versions import PolicyVersion
from tests.support.faults.unreadable import unreadable
from trainer.errors import AdapterError, FilesAltered, FilesUnread
from trainer.publishing import adapters
from trainer.publishing.adapters import (
    MANIFEST,
    SERVED_FILES,
    NewVersion,
    check_files,
    export_adapter,
    find_update,
    read_manifest,
    remove_folder,
    remove_half_written,
    sha256_of,
    version_folder,
    why_altered,
    write_base_hash,
    write_version,
)
from trainer.publishing.probe import ProbeRow


def save(folder: Path) -> None:
    for name in SERVED_FILES:
        (folder / name).write_text(f"{name} of {folder}")
    (folder / "trainer").mkdir()
    (folder / "trainer" / "optimizer.pt").write_bytes(b"state")
    write_base_hash(folder, "hash of the base")


def new_version(version: int = 1, **changes: Any) -> NewVersion:
    values = {
        "policy": "org/m",
        "update_id": new_id(),
        "parent_version": 0,
        "outcomes": (Outcome(episode_id=new_id(), trained=True),),
        "metrics": {"loss": 0.5},
        "probe": (ProbeRow(ids=(1, 2), logprobs=(-0.5,)),),
    } | changes
    return NewVersion(version=version, **values)


def write(root: Path, version: int = 1, **changes: Any) -> Path:
    return write_version(root, new_version(version, **changes), save)


def recorded(root: Path, number: int) -> PolicyVersion:
    """A version as training and its record leave it."""
    new = new_version(number, policy="m")
    folder = write_version(root, new, save)
    return PolicyVersion(
        name="m",
        version=number,
        state="serving",
        served_name=f"m@{number}",
        adapter_path=str(folder),
        update_id=new.update_id,
        manifest_sha256=sha256_of(folder / MANIFEST),
    )


def test_written_version_is_found_by_its_update(tmp_path: Path) -> None:
    update_id = new_id()
    folder = write(tmp_path, update_id=update_id)
    assert folder == version_folder(tmp_path, "org/m", 1)
    found = find_update(tmp_path, "org/m", update_id)
    assert found is not None
    assert found[1].metrics == {"loss": 0.5}
    assert found[1].probe[0].logprobs == (-0.5,)
    assert find_update(tmp_path, "org/m", new_id()) is None


def test_a_version_is_never_written_twice(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(AdapterError, match="never change"):
        write(tmp_path)


def test_a_save_that_breaks_off_leaves_no_version(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        save(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_version(tmp_path, new_version(policy="m"), broken)
    assert read_manifest(version_folder(tmp_path, "m", 1)) is None
    remove_half_written(tmp_path, "m")
    assert list((tmp_path / "m").iterdir()) == []


def test_sweep_of_the_adapter_folder_keeps_every_version_whole(tmp_path: Path) -> None:
    for version in range(1, 12):
        write(tmp_path, version)
    (tmp_path / "org--m" / ".3-removed").mkdir()
    remove_half_written(tmp_path, "org/m")
    for version in range(1, 12):
        folder = version_folder(tmp_path, "org/m", version)
        assert (folder / "adapter_model.safetensors").exists()
        assert (folder / "trainer").exists()
    assert not list((tmp_path / "org--m").glob(".*"))


def test_a_removed_version_is_not_seen_half_removed(tmp_path: Path) -> None:
    folder = write(tmp_path)
    parent = folder.parent
    remove_folder(folder)
    assert list(parent.iterdir()) == []
    # A second one does nothing.
    remove_folder(folder)


# Files that are not those that the update wrote


def test_version_with_its_files_as_written_is_not_altered(tmp_path: Path) -> None:
    version = recorded(tmp_path, 1)
    assert why_altered(version) is None
    # Of earlier versions of Pawl the database has no hash.
    assert why_altered(msgspec.structs.replace(version, manifest_sha256=None)) is None


@pytest.mark.parametrize("name", SERVED_FILES)
def test_changed_byte_of_a_versions_file_is_found(tmp_path: Path, name: str) -> None:
    version = recorded(tmp_path, 1)
    file = Path(version.adapter_path or "") / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "its SHA-256 is not the one in" in (why_altered(version) or "")


def test_files_of_another_version_count_as_altered(tmp_path: Path) -> None:
    version, other = recorded(tmp_path, 1), recorded(tmp_path, 2)
    folder = Path(version.adapter_path or "")
    shutil.rmtree(folder)
    shutil.copytree(other.adapter_path or "", folder)
    assert "is not the one that its update wrote" in (why_altered(version) or "")
    unhashed = msgspec.structs.replace(version, manifest_sha256=None)
    assert "has the files of m@2" in (why_altered(unhashed) or "")


def test_forged_files_with_a_matching_manifest_count_as_altered(tmp_path: Path) -> None:
    version = recorded(tmp_path, 1)
    folder = Path(version.adapter_path or "")
    (folder / SERVED_FILES[1]).write_text("mine")
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes())
    manifest["sha256"][SERVED_FILES[1]] = sha256_of(folder / SERVED_FILES[1])
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    assert "is not the one that its update wrote" in (why_altered(version) or "")


@pytest.mark.parametrize("name", [MANIFEST, SERVED_FILES[0]])
async def test_missing_files_are_reported_with_the_version_and_the_remedy(
    tmp_path: Path, name: str
) -> None:
    version = recorded(tmp_path, 1)
    (Path(version.adapter_path or "") / name).unlink()
    with pytest.raises(FilesAltered, match=r"m@1 is not loaded: .*restore it from a backup"):
        await check_files(version)


@pytest.mark.parametrize("name", [MANIFEST, *SERVED_FILES])
async def test_files_that_cannot_be_read_for_now_are_not_altered(tmp_path: Path, name: str) -> None:
    version = recorded(tmp_path, 1)
    file = Path(version.adapter_path or "") / name
    with unreadable(file), pytest.raises(FilesUnread, match=rf"{name} cannot be read \(Input/out"):
        await check_files(version)
    await check_files(version)


async def test_folder_in_place_of_a_file_counts_as_altered(tmp_path: Path) -> None:
    version = recorded(tmp_path, 1)
    file = Path(version.adapter_path or "") / SERVED_FILES[1]
    file.unlink()
    file.mkdir()
    with pytest.raises(FilesAltered, match="is no file"):
        await check_files(version)


# Export


@pytest.fixture
def version(tmp_path: Path) -> Path:
    return write(tmp_path / "adapters")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_export_copies_the_adapter_and_not_the_trainers_own_files(
    version: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out"
    export_adapter(version, out)
    assert names(out) == ["adapter_config.json", "adapter_model.safetensors", "base.json"]
    assert all((out / name).read_bytes() == (version / name).read_bytes() for name in names(out))
    assert names(out.parent) == ["out"]


def test_export_fills_an_empty_folder_and_refuses_a_full_folder(
    version: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_adapter(version, out)
    assert len(names(out)) == 3
    with pytest.raises(AdapterError, match="exists already and is not empty: name a new folder"):
        export_adapter(version, out)
    with pytest.raises(AdapterError, match="not empty"):
        export_adapter(version, out / "base.json")


def test_files_that_changed_or_are_gone_are_not_exported(version: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no longer has a version's files: restore them"):
        export_adapter(tmp_path / "gone", tmp_path / "out")
    (version / "adapter_model.safetensors").write_bytes(b"other")
    with pytest.raises(AdapterError, match="not the file that was written"):
        export_adapter(version, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_that_breaks_off_leaves_no_files(
    version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(adapters, "copyfile", full)
    with pytest.raises(AdapterError, match=r"cannot be written: No space left .*make room"):
        export_adapter(version, tmp_path / "out")
    assert names(tmp_path) == ["adapters"]
