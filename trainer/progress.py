"""How far training has come, kept beside a version's adapter for as long as that is."""

from pathlib import Path
from typing import Final

import msgspec

from store.records import Record
from trainer.errors import AdapterError

PROGRESS: Final = "progress.json"


class Progress(Record, frozen=True, kw_only=True):
    """Optimiser steps taken between the base and a version."""

    steps_taken: int


def write_progress(folder: Path, steps_taken: int) -> None:
    """Write it into a version's folder; raises OSError where the disk does not take it."""
    (folder / PROGRESS).write_bytes(msgspec.json.encode(Progress(steps_taken=steps_taken)))


def read_progress(folder: Path) -> int:
    """The optimiser steps taken up to the version in `folder`.

    Raises:
        AdapterError: it cannot be read.
    """
    path = folder / PROGRESS
    try:
        return msgspec.json.decode(path.read_bytes(), type=Progress).steps_taken
    except (OSError, msgspec.DecodeError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
