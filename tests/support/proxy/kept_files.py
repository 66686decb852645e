"""Read all that is kept: files below a folder in which an ingester is at work, and all rows."""

import os
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.schema.tables import metadata


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


def files_below(folder: Path) -> list[bytes]:
    """Return each file's and folder's name and bytes."""
    return [os.fsencode(path) + bytes_now(path) for path in paths_of(folder)]


async def rows_of(engine: AsyncEngine) -> list[bytes]:
    """Return the rows of all tables, as PostgreSQL writes them."""
    async with engine.connect() as connection:
        return [
            str(row).encode()
            for name in metadata.tables
            for row in await connection.execute(text(f"SELECT t::text FROM {name} t"))
        ]
