"""Make a file unreadable for a while, as a failing disk or a stale mount does."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Nothing is mapped at its beginning: it can be opened, and whoever reads gets EIO.
FAILING = "/proc/self/mem"


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Let every read of `path` end in EIO until this is left; it is there all the while."""
    whole, failing = (path.with_name(f".{path.name}.{word}") for word in ("whole", "failing"))
    whole.hardlink_to(path)
    failing.symlink_to(FAILING)
    failing.replace(path)
    try:
        yield
    finally:
        whole.replace(path)
