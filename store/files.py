"""Write files and folders so that they survive a loss of power."""

# This is not about the database. It is here because proxy and trainer need it and share only
# `store`.

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def sync(path: Path) -> None:
    """Flush `path` to disk (fsync): a file's bytes, or a folder's entries.

    Raises:
        OSError: the disk failed or is full.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, and flush its bytes to disk.

    Raises:
        OSError: the disk failed or is full; an earlier file of that name is unchanged.
    """
    with atomic_file(path, 0o600) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path, mode: int | None = None) -> Iterator[IO[bytes]]:
    """Yield a new file to write to; after the block, sync it and rename it to `path`.

    Its permissions are `mode`, by default those of the file at `path`, or of any new file. If the
    block fails, the file at `path` is unchanged. A `path` that is no regular file, such as a pipe,
    is written to directly.

    Raises:
        OSError: there is no such folder, or the disk failed or is full.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    # An existing file may be readable by others, or open in a reader: make a new one.
    path = path.resolve()
    partial = path.with_name(f"{path.name}.new")
    partial.unlink(missing_ok=True)
    created = 0o666 if mode is None else mode
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, created)
    try:
        with os.fdopen(handle, "wb") as file:
            if mode is None and path.exists():
                shutil.copymode(path, partial)
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(place: Path, partial: Path) -> Iterator[None]:
    """Make the folder `partial` to write to; after the block, sync it and rename it to `place`.

    So `place` gets all its files at once, or none. Before, `place` must be missing or an empty
    folder. If writing fails, `partial` is removed, and the attempt can be repeated.

    Raises:
        OSError: the disk refused a write.
    """
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        partial.rename(place)
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(place.parent)
