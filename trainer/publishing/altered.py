"""Check that the files of a version are those that its update wrote, before each load.

The manifest beside the files has the hash of each; the database has the manifest's, and which
update made the version. So files are found out that were altered, exchanged with those of another
version, or replaced together with a manifest of their own.
"""

import asyncio
from pathlib import Path
from typing import Final

from store.versions import PolicyVersion
from trainer.errors import AdapterError, FilesAltered
from trainer.publishing.adapters import MANIFEST, read_manifest, written_sha256
from trainer.publishing.reading import reading

RESTORE: Final = "restore it from a backup"
MOUNT: Final = (
    "let this machine see the trainer's PAWL_ADAPTER_DIR under the same path, or, if it does, "
    "restore the folder from a backup"
)


async def check_files(version: PolicyVersion) -> None:
    """Check the files of a version that is about to be loaded; they are read in a thread.

    Raises:
        FilesAltered: they are not those that were written, or are not there.
        FilesUnread: they cannot be read for now, which says nothing about the version.
    """
    why = await asyncio.to_thread(why_altered, version)
    if why is not None:
        raise FilesAltered(f"{version.served_name} is not loaded: {why}")


def why_altered(version: PolicyVersion) -> str | None:
    """Return why the files of a version are not those that its update wrote, or None if they are.

    Files that are not there at all are not those either.

    Raises:
        FilesUnread: they cannot be read for now.
    """
    folder = Path(version.adapter_path or "")
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            with reading(folder):
                return f"{folder / MANIFEST} is not there; {RESTORE if folder.exists() else MOUNT}"
        if version.manifest_sha256 not in (None, written_sha256(folder / MANIFEST)):
            return f"{folder / MANIFEST} is not the one that its update wrote; {RESTORE}"
    except AdapterError as error:
        return str(error)
    written_for = (manifest.policy, manifest.version, manifest.update_id)
    if written_for != (version.name, version.version, version.update_id):
        name = f"{manifest.policy}@{manifest.version}"
        return f"{folder} has the files of {name}, of update {manifest.update_id}; {RESTORE}"
    return None
