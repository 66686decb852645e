"""Keep beside an adapter, for good, how many optimiser steps made it and on which base model."""

from pathlib import Path
from typing import Final

import msgspec

from store.records import Record
from trainer.errors import AdapterError
from trainer.publishing.reading import reading

PROGRESS: Final = "progress.json"


class Progress(Record, frozen=True, kw_only=True):
    """Hold the content of `progress.json`: optimiser steps between the base and a version.

    `base` is the hash of that base model (`trainer.learners.fit`), or None if whoever wrote the
    file did not know it.
    """

    steps_taken: int
    base: str | None = None


def write_progress(folder: Path, steps_taken: int, base: str | None = None) -> None:
    """Write the progress file into a version's folder.

    Raises:
        OSError: the disk refused the write.
    """
    progress = Progress(steps_taken=steps_taken, base=base)
    (folder / PROGRESS).write_bytes(msgspec.json.encode(progress))


def read_progress(folder: Path) -> int:
    """Return the optimiser steps taken up to the version in `folder`.

    Raises:
        AdapterError: the file is missing or damaged.
        FilesUnread: it cannot be read for now.
    """
    return _read(folder).steps_taken


def read_base(folder: Path) -> str | None:
    """Return the hash of the base model of the version in `folder`, or None if it is not known.

    Raises:
        AdapterError: the file is missing or damaged.
        FilesUnread: it cannot be read for now.
    """
    return _read(folder).base


def _read(folder: Path) -> Progress:
    path = folder / PROGRESS
    try:
        with reading(path):
            return msgspec.json.decode(path.read_bytes(), type=Progress)
    except msgspec.DecodeError as error:
        raise AdapterError(f"{path} cannot be read: {error}; restore it from a backup") from error
