"""Pass keys on as a file, written by the keeper and watched by those who check them.

It holds hashes and no key. Its folder is made with the first key that there ever was, and stays:
where there is a folder, and no file that can be read, keys were made and are not known.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from proxy.spool.folders import PRIVATE
from store.files import sync, whole_folder, write_private
from store.keys.keys import KeyRing

log = structlog.get_logger()

FOLDER: Final = "access"
NAME: Final = "keys.json"
WATCH_S: Final = 0.1
NO_KEYS: Final = KeyRing(made=False)
# What the file is known by: time of change and inode; a word where there is none.
Mark = tuple[int, int] | str


class KeyFile:
    """Keep what the keys allow in a file, as the keeper last read it."""

    def __init__(self, spool_dir: Path) -> None:
        """Place the file below `spool_dir`; nothing is read yet."""
        self._path = spool_dir / FOLDER / NAME
        self._seen: Mark | None = None

    def write(self, ring: KeyRing) -> None:
        """Replace the file atomically and durably; without any key made there need be none.

        Raises:
            OSError: the disk failed or is full; the file is as it was.
        """
        folder, content = self._path.parent, msgspec.json.encode(ring)
        if folder.exists():
            partial = self._path.with_suffix(".part")
            write_private(partial, content)
            partial.replace(self._path)
            sync(folder)
        elif ring.made:
            # At no moment is there a folder without the file in it.
            partial = folder.with_suffix(".part")
            with whole_folder(folder, partial):
                partial.chmod(PRIVATE)
                write_private(partial / NAME, content)

    def changed(self) -> bool:
        """Return whether the file is another than at the last call."""
        seen, self._seen = self._seen, self._mark()
        return self._seen != seen

    def read(self) -> KeyRing | None:
        """Return what the keys allow, or None where keys were made and are not known.

        What cannot be read is logged.
        """
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=KeyRing)
        except FileNotFoundError as error:
            if not self._path.parent.exists():
                return NO_KEYS
            why: Exception = error
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            why = error
        log.error("keys_unreadable", path=str(self._path), reason=str(why))
        return None

    async def watch(self, take: Callable[[KeyRing | None], None]) -> None:
        """Call `take` with what `read` returns whenever the file changes; never return."""
        while True:
            if self.changed():
                take(self.read())
            await asyncio.sleep(WATCH_S)

    def _mark(self) -> Mark:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return "lost" if self._path.parent.exists() else "none"
        except OSError:
            return "lost"
        return status.st_mtime_ns, status.st_ino
