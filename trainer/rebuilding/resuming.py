"""Tell from which of the versions that are there a rebuild can go on, and what it needs then."""

from collections.abc import Sequence
from pathlib import Path

from store.rebuilding.line import Done, Line
from store.rebuilding.outlook import Missing, Outlook
from trainer.errors import AdapterError
from trainer.publishing import adapters
from trainer.publishing.adapters import STATE


def furthest(done: Sequence[Done], line: Line, adapter_dir: Path, policy: str) -> Done:
    """Return the furthest way that a rebuild can go on in; if there is none, its beginning.

    To train on from a version needs its adapter and its optimiser state. One that is the end of the
    line needs its adapter alone.

    Raises:
        FilesUnread: files of a version cannot be read for now.
    """
    for way in done:
        is_whole = len(way.rows) == len(line.items)
        if not way.version or _is_there(adapter_dir, policy, way.version, with_state=not is_whole):
            return way
    return Done(rows=(), version=line.root)


def _is_there(adapter_dir: Path, policy: str, version: int, *, with_state: bool) -> bool:
    folder = adapters.version_folder(adapter_dir, policy, version)
    try:
        is_whole = adapters.read_manifest(folder) is not None
    except AdapterError:
        return False
    return is_whole and (not with_state or any((folder / STATE).glob("*.pt")))


def needed(seen: Outlook, done: Done) -> list[Missing]:
    """Return what cannot be read any more of the updates that are to be done again."""
    again = {item.source.id for item in seen.line.items[len(done.rows) :]}
    return [one for one in seen.missing if one.update_id in again]
