"""Read the files below a folder in which an ingester is at work: it takes some of them away."""

import os
from collections.abc import Iterator
from pathlib import Path


def paths_of(folder: Path) -> Iterator[Path]:
    """Yield what is below a folder; unlike `rglob`, this passes over a folder that is gone."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(parent) / name


def bytes_now(path: Path) -> bytes:
    """Return a file's bytes; none of a folder, nor of what is gone, which keeps no word."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        return b""
