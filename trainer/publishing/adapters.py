"""Write and read a policy version's files: a temporary folder is written, synced and renamed.

    <adapter_dir>/<policy>/<version>/
        adapter_config.json  adapter_model.safetensors     what the model server reads
        manifest.json                                      update, parent, hashes, outcomes
        base.json                                          hash of the base model
        trainer/                                           optimiser state, to resume training

A version exists from the moment of the rename. Its manifest holds everything needed to record and
probe it, so that recovery after a crash makes the same rows and checks. The manifest has the hash
of each served file, and the database has the hash of the manifest, so that `check_files` finds
files that were altered, swapped, or replaced together with their manifest.

Functions that read a version's files raise `AdapterError` if a file is missing, damaged or altered,
and `FilesUnread` if it cannot be read for now, which says nothing about the version.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import file_digest
from pathlib import Path
from shutil import copyfile
from typing import Any, Final
from uuid import UUID

import msgspec
import structlog

from store.claims import Outcome
from store.files import atomic_folder
from store.records import Record
from store.versions import PolicyVersion
from trainer.errors import AdapterError, FileMissing, FilesAltered, FilesUnread
from trainer.publishing.probe import ProbeRow

log = structlog.get_logger()

MANIFEST: Final = "manifest.json"
SERVED_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
STATE_FOLDER: Final = "trainer"


class NewVersion(Record, frozen=True, kw_only=True):
    """A version that an update is about to write.

    `outcomes` has the outcome of each of the update's episodes, `metrics` the update's figures
    (JSON-ready), and `baselines` the moving baselines for the next update, if any.
    """

    policy: str
    version: int
    update_id: UUID
    parent_version: int
    outcomes: tuple[Outcome, ...]
    metrics: Mapping[str, Any]
    probe: tuple[ProbeRow, ...]
    baselines: Mapping[str, Any] | None = None


class Manifest(NewVersion, frozen=True, kw_only=True):
    """The content of `manifest.json`; `sha256` maps the name of each served file to its hash."""

    sha256: dict[str, str]


def version_folder(root: Path, policy: str, version: int) -> Path:
    """Return the folder of a version; slashes in the policy's name become `--`."""
    return root.resolve() / policy.replace("/", "--") / str(version)


def write_version(root: Path, new: NewVersion, save: Callable[[Path], None]) -> Path:
    """Let `save` write the files into a temporary folder, and rename it to the version's folder.

    Return the folder; the version exists now.

    Raises:
        AdapterError: the version exists already; its files are not touched.
        OSError: the disk refused a write; the attempt left no files and can be repeated.
    """
    place = version_folder(root, new.policy, new.version)
    if place.exists():
        raise AdapterError(
            f"{place} exists already, and a version's files never change: another trainer wrote"
            " it; stop one of the two and start this one again"
        )
    partial = place.with_name(f".{new.version}-{new.update_id}")
    with atomic_folder(place, partial):
        save(partial)
        hashes = {name: sha256_of(partial / name) for name in SERVED_FILES}
        manifest = Manifest(sha256=hashes, **msgspec.structs.asdict(new))
        (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    return place


def write_hashes(folder: Path) -> str:
    """Write a manifest with only file hashes into a folder; return the manifest's SHA-256.

    With it a folder that is no version, such as a self-test's, can be fetched like one.
    """
    hashes = {name: sha256_of(folder / name) for name in SERVED_FILES}
    (folder / MANIFEST).write_bytes(msgspec.json.encode({"sha256": hashes}))
    return sha256_of(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest | None:
    """Check the files of a version's folder and return its manifest; None if it has none."""
    manifest = _parse_manifest(folder)
    for name, expected in manifest.sha256.items() if manifest is not None else ():
        if version_file_sha256(folder / name) != expected:
            raise AdapterError(
                f"{folder / name} is not the file that was written: its SHA-256 is not the one in"
                f" {MANIFEST}; restore it from a backup"
            )
    return manifest


def _parse_manifest(folder: Path) -> Manifest | None:
    path = folder / MANIFEST
    try:
        with translate_errors(path):
            return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read: {error}; restore it from a backup") from error
    except FileMissing:
        return None


def read_probe(folder: Path) -> tuple[ProbeRow, ...]:
    """Return the probe rows of the version in a folder; none if it has no manifest."""
    manifest = _parse_manifest(folder)
    return () if manifest is None else manifest.probe


def find_update(root: Path, policy: str, update_id: UUID) -> tuple[Path, Manifest] | None:
    """Return the folder and manifest of the version that an update wrote, or None if there is none.

    If it raises `FilesUnread`, the update may have written a version.
    """
    for _, folder in reversed(version_folders(root, policy)):
        unchecked = _parse_manifest(folder)
        if unchecked is not None and unchecked.update_id == update_id:
            manifest = read_manifest(folder)
            assert manifest is not None
            return folder, manifest
    return None


def version_folders(root: Path, policy: str) -> list[tuple[int, Path]]:
    """Return the numbers and paths of the policy's version folders, lowest number first."""
    parent = version_folder(root, policy, 0).parent
    return sorted((int(folder.name), folder) for folder in parent.glob("[0-9]*"))


def remove_half_written(root: Path, policy: str) -> None:
    """Remove half-written folders of killed updates, and folders of interrupted removals.

    A folder that the disk refuses to remove is logged, and stays until the next time.
    """
    parent = version_folder(root, policy, 0).parent
    for partial in parent.glob(".*-*"):
        try:
            shutil.rmtree(partial)
        except OSError as error:
            log.warning("folder_not_removed", folder=str(partial), reason=str(error))


def remove_folder(folder: Path) -> None:
    """Remove a folder atomically, by renaming it first; do nothing if there is none.

    Raises:
        OSError: the disk refused; a folder that is renamed already is left to
            `remove_half_written`.
    """
    if folder.exists():
        renamed = folder.with_name(f".{folder.name}-removed")
        folder.rename(renamed)
        shutil.rmtree(renamed)


def version_file_sha256(path: Path) -> str:
    """Return the SHA-256 of a version's file, in hexadecimal digits."""
    with translate_errors(path):
        return sha256_of(path)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Translate the OS errors of reading `path` in the `with` block.

    Raises:
        FileMissing: the path does not exist.
        AdapterError: the path is a directory.
        FilesUnread: the disk refuses to read it for now.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileMissing(f"{path} is not there; restore it from a backup") from error
    except IsADirectoryError as error:
        raise AdapterError(f"{path} is no file; restore it from a backup") from error
    except OSError as error:
        raise FilesUnread(
            f"{path} cannot be read ({error.strerror or error}); it is tried again, as this may be"
            " temporary: check its disk, its mount and its permissions"
        ) from error


BASE_FILE: Final = "base.json"


class BaseHash(Record, frozen=True, kw_only=True):
    """The content of `base.json`: the hash of a base model (`trainer.learners.model.base_hash`)."""

    base: str


def write_base_hash(folder: Path, base: str) -> None:
    """Write the hash of the base model into a version's folder."""
    (folder / BASE_FILE).write_bytes(msgspec.json.encode(BaseHash(base=base)))


def read_base_hash(folder: Path) -> str:
    """Return the hash of the base model of the version in `folder`."""
    path = folder / BASE_FILE
    try:
        with translate_errors(path):
            return msgspec.json.decode(path.read_bytes(), type=BaseHash).base
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read: {error}; restore it from a backup") from error


RESTORE_REMEDY: Final = "restore it from a backup"
MOUNT_REMEDY: Final = (
    "let this machine see the trainer's PAWL_ADAPTER_DIR under the same path, or, if it does, "
    "restore the folder from a backup"
)


async def check_files(version: PolicyVersion, folder: Path | None = None) -> None:
    """Check, in a thread, the files of a version that is about to be loaded.

    `folder` has the files (None: they are at the trainer's path).

    Raises:
        FilesAltered: files are missing, or differ from those that the version's update wrote.
    """
    why = await asyncio.to_thread(why_altered, version, folder)
    if why is not None:
        raise FilesAltered(f"{version.served_name} is not loaded: {why}")


def why_altered(version: PolicyVersion, folder: Path | None = None) -> str | None:
    """Return why a version's files are not those that its update wrote, or None if they are.

    `folder` is as in `check_files`.
    """
    folder = folder or Path(version.adapter_path or "")
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            with translate_errors(folder):
                remedy = RESTORE_REMEDY if folder.exists() else MOUNT_REMEDY
                return f"{folder / MANIFEST} is not there; {remedy}"
        if version.manifest_sha256 not in (None, version_file_sha256(folder / MANIFEST)):
            return f"{folder / MANIFEST} is not the one that its update wrote; {RESTORE_REMEDY}"
    except AdapterError as error:
        return str(error)
    written_for = (manifest.policy, manifest.version, manifest.update_id)
    if written_for != (version.name, version.version, version.update_id):
        name = f"{manifest.policy}@{manifest.version}"
        return f"{folder} has the files of {name}, of update {manifest.update_id}; {RESTORE_REMEDY}"
    return None


# `BASE_FILE` identifies the base model by hash, so that an import need not rely on its name.
EXPORTED_FILES: Final = (*SERVED_FILES, BASE_FILE)


def copy_adapter(version: Path, folder: Path) -> None:
    """Copy the adapter of a version's folder into another folder.

    Raises:
        OSError: a file cannot be read or written.
    """
    for name in EXPORTED_FILES:
        if (version / name).exists():
            copyfile(version / name, folder / name)


def export_adapter(
    version: Path, directory: Path, write: Callable[[Path, Path], None] = copy_adapter
) -> None:
    """Export the version in the folder `version` to `directory`, completely or not at all.

    `write` is called with the version's folder and the folder to write into.

    Raises:
        AdapterError: the version's files are gone or were changed, or `directory` is not empty or
            cannot be written.
    """
    if read_manifest(version) is None:
        raise AdapterError(f"{version} no longer has a version's files: restore them from a backup")
    place = directory.resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise AdapterError(f"{directory} exists already and is not empty: name a new folder")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{place.name}.partial")
        with atomic_folder(place, partial):
            write(version, partial)
    except OSError as error:
        if not version.exists():
            raise AdapterError(f"{version} was deleted meanwhile: it was retired") from error
        raise AdapterError(
            f"{directory} cannot be written: {error.strerror}; name a folder on another disk, or"
            " make room"
        ) from error
