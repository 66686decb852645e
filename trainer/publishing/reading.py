"""Tell a file of a version that is not as it was written from one that cannot be read for now.

The first is decided upon, for ever: a version is rejected, calls that it sampled are not trained.
The second may pass (EIO, EACCES, ESTALE, EMFILE …), so nothing is decided, and it is tried again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import AdapterError, FileMissing, FilesUnread


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Give an error of reading `path` within this block its meaning.

    Raises:
        FileMissing: it is not there.
        AdapterError: it is no file.
        FilesUnread: the disk refuses it for now.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileMissing(f"{path} is not there; restore it from a backup") from error
    except IsADirectoryError as error:
        raise AdapterError(f"{path} is no file; restore it from a backup") from error
    except OSError as error:
        raise FilesUnread(
            f"{path} cannot be read ({error.strerror or error}), which may pass and is tried again;"
            " check its disk, its mount and its permissions"
        ) from error
