"""Files that are not those that an update wrote: each way in which they differ is told."""

import shutil
from pathlib import Path

import msgspec
import pytest

from store.ids import new_id
from store.versions import PolicyVersion
from tests.support.faults.unreadable import unreadable
from trainer.errors import FilesAltered, FilesUnread
from trainer.publishing.adapters import (
    MANIFEST,
    SERVED,
    NewVersion,
    check_files,
    sha256_of,
    why_altered,
    write_version,
)


def save(folder: Path) -> None:
    for name in SERVED:
        (folder / name).write_text(f"{name} of {folder}")


def written(root: Path, number: int) -> PolicyVersion:
    new = NewVersion(
        policy="m",
        version=number,
        update_id=new_id(),
        parent_version=0,
        outcomes=(),
        metrics={},
        probe=(),
    )
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


def test_files_as_they_were_written_are_not_altered(tmp_path: Path) -> None:
    version = written(tmp_path, 1)
    assert why_altered(version) is None
    # Of earlier versions of Pawl the database has no hash.
    assert why_altered(msgspec.structs.replace(version, manifest_sha256=None)) is None


@pytest.mark.parametrize("name", SERVED)
def test_one_other_byte_is_found(tmp_path: Path, name: str) -> None:
    version = written(tmp_path, 1)
    file = Path(version.adapter_path or "") / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "its SHA-256 is not the one in" in (why_altered(version) or "")


def test_another_versions_files_are_found(tmp_path: Path) -> None:
    version, other = written(tmp_path, 1), written(tmp_path, 2)
    folder = Path(version.adapter_path or "")
    shutil.rmtree(folder)
    shutil.copytree(other.adapter_path or "", folder)
    assert "is not the one that its update wrote" in (why_altered(version) or "")
    unhashed = msgspec.structs.replace(version, manifest_sha256=None)
    assert "has the files of m@2" in (why_altered(unhashed) or "")


def test_files_with_a_manifest_that_fits_them_are_found(tmp_path: Path) -> None:
    version = written(tmp_path, 1)
    folder = Path(version.adapter_path or "")
    (folder / SERVED[1]).write_text("mine")
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes())
    manifest["sha256"][SERVED[1]] = sha256_of(folder / SERVED[1])
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    assert "is not the one that its update wrote" in (why_altered(version) or "")


@pytest.mark.parametrize("name", [MANIFEST, SERVED[0]])
async def test_missing_files_are_told_with_the_version(tmp_path: Path, name: str) -> None:
    version = written(tmp_path, 1)
    (Path(version.adapter_path or "") / name).unlink()
    with pytest.raises(FilesAltered, match=r"m@1 is not loaded: .*restore it from a backup"):
        await check_files(version)


@pytest.mark.parametrize("name", [MANIFEST, *SERVED])
async def test_files_that_cannot_be_read_for_now_are_not_altered(tmp_path: Path, name: str) -> None:
    version = written(tmp_path, 1)
    file = Path(version.adapter_path or "") / name
    with unreadable(file), pytest.raises(FilesUnread, match=rf"{name} cannot be read \(Input/out"):
        await check_files(version)
    await check_files(version)


async def test_a_folder_in_place_of_a_file_is_no_error_that_passes(tmp_path: Path) -> None:
    version = written(tmp_path, 1)
    file = Path(version.adapter_path or "") / SERVED[1]
    file.unlink()
    file.mkdir()
    with pytest.raises(FilesAltered, match="is no file"):
        await check_files(version)
