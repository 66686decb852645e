"""Keys that the workers of one machine have taken, each a symbolic link that names a body's hash.

To make a link is one step that succeeds for one worker alone, and its target is there from the
start: nobody can read half of it. Nothing is synced: after a crash of the machine a key may be
taken again, with another body too, and then the ledger keeps both.
"""

import os
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger()

FOLDER: Final = "keys"
# Clients repeat within minutes; a day is what APIs with such keys commonly promise.
KEEP_S: Final = 86_400.0
# The newest are kept: a link takes an inode.
MOST: Final = 200_000


class KeyFiles:
    """The links under one spool directory."""

    def __init__(self, spool_dir: Path) -> None:
        self._folder = spool_dir / FOLDER

    def take(self, key: str, body_hash: str) -> str | None:
        """Take a key for a body; returns the hash it is taken for already, None if it was free.

        A disk that refuses takes nothing, and says so in the log: what comes twice is kept
        apart by the ledger.
        """
        path = self._path(key)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            os.symlink(body_hash, path)
        except FileExistsError:
            with suppress(OSError):
                return os.readlink(path)
        except OSError as error:
            log.error("idempotency_key_not_kept", reason=str(error))
        return None

    def give_back(self, key: str) -> None:
        """Free a key whose body was not taken after all."""
        self._path(key).unlink(missing_ok=True)

    def clean(self, now: float | None = None) -> int:
        """Forget keys that are old, or too many; how many were."""
        found: list[tuple[float, str]] = []
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                # Another process may clean, or give back, at the same time.
                with suppress(FileNotFoundError):
                    found.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
        found.sort(reverse=True)
        oldest = (time.time() if now is None else now) - KEEP_S
        old = [path for number, (at, path) in enumerate(found) if number >= MOST or at < oldest]
        for path in old:
            with suppress(FileNotFoundError):
                os.unlink(path)
        return len(old)

    def _path(self, key: str) -> Path:
        return self._folder / sha256(key.encode()).hexdigest()
