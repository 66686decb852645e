"""Write and read the files of a policy version: beside its place, synced, renamed into it.

    <adapter_dir>/<policy>/<version>/
        adapter_config.json  adapter_model.safetensors     what the model server reads
        manifest.json                                      update, parent, hashes, outcomes
        trainer/                                           what resuming needs

A version exists from the moment of the rename. Its manifest holds all that is needed to
record and to probe it, so that a crash after the rename ends in the same rows and checks.
"""

import shutil
from collections.abc import Callable, Mapping
from hashlib import file_digest
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec
import structlog

from store.files import whole_folder
from store.records import Record
from store.updates.claims import Outcome
from trainer.errors import AdapterError, FileMissing
from trainer.publishing.probing.probe import ProbeRow
from trainer.publishing.reading import reading

log = structlog.get_logger()

MANIFEST: Final = "manifest.json"
SERVED: Final = ("adapter_config.json", "adapter_model.safetensors")
STATE: Final = "trainer"


class NewVersion(Record, frozen=True, kw_only=True):
    """Describe a version that an update is about to write.

    `outcomes` are those of the update's episodes, `metrics` its figures, JSON-ready, and
    `baselines` the moving baselines that it leaves to the next update, if any.
    """

    policy: str
    version: int
    update_id: UUID
    parent_version: int
    outcomes: tuple[Outcome, ...]
    metrics: Mapping[str, Any]
    probe: tuple[ProbeRow, ...]
    baselines: Mapping[str, Any] | None = None


class Manifest(Record, frozen=True, kw_only=True):
    """Hold the content of `manifest.json`: what `NewVersion` says, in this order, with the hashes.

    `sha256` maps the name of each served file to its hash.
    """

    policy: str
    version: int
    update_id: UUID
    parent_version: int
    sha256: dict[str, str]
    outcomes: tuple[Outcome, ...]
    metrics: Mapping[str, Any]
    probe: tuple[ProbeRow, ...]
    baselines: Mapping[str, Any] | None = None


def version_folder(root: Path, policy: str, version: int) -> Path:
    """Return the folder of a version; slashes in the policy's name become `--`."""
    return root.resolve() / policy.replace("/", "--") / str(version)


def write_version(root: Path, new: NewVersion, save: Callable[[Path], None]) -> Path:
    """Let `save` write the files into a temporary folder, then rename it: the version exists.

    Raises:
        AdapterError: the version exists already; its files are not touched.
        OSError: the disk refused a write; nothing is left of the attempt, and it can be repeated.
    """
    place = version_folder(root, new.policy, new.version)
    if place.exists():
        raise AdapterError(
            f"{place} exists already, and a version's files never change: another trainer wrote"
            " it; stop one of the two and start this one again"
        )
    partial = place.with_name(f".{new.version}-{new.update_id}")
    with whole_folder(place, partial):
        save(partial)
        _write_manifest(partial, new)
    return place


def _write_manifest(folder: Path, new: NewVersion) -> None:
    """Write the manifest beside the served files, with their hashes."""
    manifest = Manifest(
        sha256={name: sha256_of(folder / name) for name in SERVED}, **msgspec.structs.asdict(new)
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a version's folder, or None if there is no such version.

    Raises:
        AdapterError: the manifest is damaged, or a file is missing or does not have the hash in it.
        FilesUnread: a file cannot be read for now.
    """
    manifest = _manifest(folder)
    for name, expected in manifest.sha256.items() if manifest is not None else ():
        if written_sha256(folder / name) != expected:
            raise AdapterError(
                f"{folder / name} is not the file that was written: its SHA-256 is not the one in"
                f" {MANIFEST}; restore it from a backup"
            )
    return manifest


def _manifest(folder: Path) -> Manifest | None:
    path = folder / MANIFEST
    try:
        with reading(path):
            return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise AdapterError(f"{path} cannot be read: {error}; restore it from a backup") from error
    except FileMissing:
        return None


def probe_of(folder: Path) -> tuple[ProbeRow, ...]:
    """Return the rows that the version in a folder is probed with; none if it has no manifest.

    Raises:
        AdapterError: the manifest is damaged.
        FilesUnread: it cannot be read for now.
    """
    manifest = _manifest(folder)
    return () if manifest is None else manifest.probe


def find_update(root: Path, policy: str, update_id: UUID) -> tuple[Path, Manifest] | None:
    """Return the folder and manifest of the version that an update wrote, or None if it wrote none.

    Raises:
        AdapterError: the manifest is damaged, or a file is missing or does not have the hash in it.
        FilesUnread: a file cannot be read for now; the update may have written it.
    """
    for _, folder in reversed(folders(root, policy)):
        unchecked = _manifest(folder)
        if unchecked is not None and unchecked.update_id == update_id:
            manifest = read_manifest(folder)
            assert manifest is not None
            return folder, manifest
    return None


def highest_version(root: Path, policy: str) -> int:
    """Return the highest version number that has a folder, recorded or not, or 0 if there is none.

    A trainer that had lost its claim may have written an unrecorded one: its number is taken.
    """
    return max((number for number, _ in folders(root, policy)), default=0)


def folders(root: Path, policy: str) -> list[tuple[int, Path]]:
    """Return the number and the folder of every version that has one, oldest first."""
    parent = version_folder(root, policy, 0).parent
    return sorted((int(folder.name), folder) for folder in parent.glob("[0-9]*"))


def sweep(root: Path, policy: str) -> None:
    """Remove what killed updates left half-written, and what was being removed.

    What the disk refuses is logged, and stays until the next time.
    """
    parent = version_folder(root, policy, 0).parent
    for partial in parent.glob(".*-*"):
        try:
            shutil.rmtree(partial)
        except OSError as error:
            log.warning("folder_not_removed", folder=str(partial), reason=str(error))


def remove(folder: Path) -> None:
    """Remove a folder so that it is there whole or not at all, or do nothing if there is none.

    Raises:
        OSError: the disk refused it; it may be gone from its place, and `sweep` removes the rest.
    """
    if folder.exists():
        going = folder.with_name(f".{folder.name}-removed")
        folder.rename(going)
        shutil.rmtree(going)


def written_sha256(path: Path) -> str:
    """Return the SHA-256 of a version's file, in hexadecimal digits.

    Raises:
        AdapterError: it is not there.
        FilesUnread: it cannot be read for now.
    """
    with reading(path):
        return sha256_of(path)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
