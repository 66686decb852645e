"""Keep the number of optimiser steps taken up to a version beside its adapter, for good."""

from pathlib import Path
from typing import Final

import msgspec

from store.records import Record
from trainer.errors import AdapterError

PROGRESS: Final = "progress.json"


class Progress(Record, frozen=True, kw_only=True):
    """Hold the content of `progress.json`: optimiser steps between the base and a version."""

    steps_taken: int


def write_progress(folder: Path, steps_taken: int) -> None:
    """Write the progress file into a version's folder.

    Raises:
        OSError: the disk refused the write.
    """
    (folder / PROGRESS).write_bytes(msgspec.json.encode(Progress(steps_taken=steps_taken)))


def read_progress(folder: Path) -> int:
    """Return the optimiser steps taken up to the version in `folder`.

    Raises:
        AdapterError: the file cannot be read.
    """
    path = folder / PROGRESS
    try:
        return msgspec.json.decode(path.read_bytes(), type=Progress).steps_taken
    except (OSError, msgspec.DecodeError) as error:
        raise AdapterError(f"{path} cannot be read: {error}; restore it from a backup") from error
