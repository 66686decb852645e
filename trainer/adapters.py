"""A version's files: written beside their place, synced, then renamed into it, whole.

    <adapter_dir>/<policy>/<version>/
        adapter_config.json  adapter_model.safetensors     what the server reads
        manifest.json                                      update, parent, hashes, outcomes
        trainer/                                           what resuming needs

The rename is the moment a version exists. Its manifest carries all that recording and
probing it needs, so that a crash after the rename ends in the same rows and the same checks.
"""

import shutil
from collections.abc import Callable, Mapping
from hashlib import file_digest
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec

from store.claims import Outcome
from store.files import sync
from store.records import Record
from trainer.errors import AdapterError
from trainer.probe import ProbeRow

MANIFEST: Final = "manifest.json"
SERVED: Final = ("adapter_config.json", "adapter_model.safetensors")
STATE: Final = "trainer"
STATES_KEPT: Final = 3


class Manifest(Record, frozen=True, kw_only=True):
    """What a version is and came from."""

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
    """Where a version lies; a policy's name may hold slashes, its folder does not."""
    return root.resolve() / policy.replace("/", "--") / str(version)


def write_version(
    root: Path,
    policy: str,
    version: int,
    save: Callable[[Path], None],
    *,
    update_id: UUID,
    parent_version: int,
    outcomes: tuple[Outcome, ...],
    metrics: Mapping[str, Any],
    probe: tuple[ProbeRow, ...],
    baselines: Mapping[str, Any] | None = None,
) -> Path:
    """Have `save` write the files, then make the version exist.

    Raises:
        AdapterError: there is such a version already; its bytes are not touched.
        OSError: the disk does not take it; nothing is left of it, and it may be tried again.
    """
    place = version_folder(root, policy, version)
    if place.exists():
        raise AdapterError(f"{place} exists: a version's bytes never change")
    partial = place.with_name(f".{version}-{update_id}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save(partial)
        manifest = Manifest(
            policy=policy,
            version=version,
            update_id=update_id,
            parent_version=parent_version,
            sha256={name: _sha256(partial / name) for name in SERVED},
            outcomes=outcomes,
            metrics=metrics,
            probe=probe,
            baselines=baselines,
        )
        (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        partial.rename(place)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(place.parent)
    return place


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a version's folder; None where there is no such version.

    Raises:
        AdapterError: the files are not what it says.
    """
    manifest = _manifest(folder)
    for name, expected in manifest.sha256.items() if manifest is not None else ():
        if _sha256(folder / name) != expected:
            raise AdapterError(f"{folder / name} is not the file that was written")
    return manifest


def _manifest(folder: Path) -> Manifest | None:
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error


def find_update(root: Path, policy: str, update_id: UUID) -> tuple[Path, Manifest] | None:
    """The version that an update wrote, if it came that far.

    Raises:
        AdapterError: see `read_manifest`.
    """
    for _, folder in reversed(_folders(root, policy)):
        found = _manifest(folder)
        if found is not None and found.update_id == update_id:
            manifest = read_manifest(folder)
            assert manifest is not None
            return folder, manifest
    return None


def highest_version(root: Path, policy: str) -> int:
    """The highest number that has a folder, whether or not it was recorded; 0 for none.

    One may have been written by a trainer that had lost its claim; its number is taken.
    """
    return max((number for number, _ in _folders(root, policy)), default=0)


def _folders(root: Path, policy: str) -> list[tuple[int, Path]]:
    parent = version_folder(root, policy, 0).parent
    return sorted((int(folder.name), folder) for folder in parent.glob("[0-9]*"))


def sweep(root: Path, policy: str) -> None:
    """Remove what killed updates left half-written, and optimiser states of old versions.

    The served files stay for as long as their name can be asked for: vLLM's engine dies
    over a missing folder.
    """
    parent = version_folder(root, policy, 0).parent
    for partial in parent.glob(".*-*"):
        shutil.rmtree(partial)
    for _, folder in _folders(root, policy)[:-STATES_KEPT]:
        shutil.rmtree(folder / STATE, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
