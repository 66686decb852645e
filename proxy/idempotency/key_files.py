"""Keep the keys that one machine's workers have taken, each a symbolic link to its body's hash.

symlink(2) is atomic: it succeeds for one worker only, and the link's target can never be read
half written. Nothing is synced: after a crash of the machine a key may be taken again, even for
another body, and then the ledger keeps both.
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
# Clients repeat within minutes; APIs with idempotency keys commonly promise a day.
KEEP_S: Final = 86_400.0
# Most keys that are kept, the newest first: each link takes an inode.
MOST: Final = 200_000


class KeyFiles:
    """Keep the key links under one spool directory."""

    def __init__(self, spool_dir: Path) -> None:
        """Use the folder `keys` of `spool_dir`; it is created with the first key."""
        self._folder = spool_dir / FOLDER

    def take(self, key: str, body_hash: str) -> str | None:
        """Take a key for a body; return the hash it is already taken for, or None if it was free.

        If the disk fails, that is logged and the key counts as free: the ledger recognises
        repeats by itself.
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
        """Free a key whose body could not be recorded; a disk that fails is logged."""
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            log.error("idempotency_key_not_freed", reason=str(error))

    def clean(self, now: float | None = None) -> int:
        """Delete keys older than a day, and the oldest beyond `MOST`; return how many.

        `now` is Unix time in seconds, by default the present.
        """
        links: list[tuple[float, str]] = []
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                # Another process may delete keys at the same time.
                with suppress(FileNotFoundError):
                    links.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
        links.sort(reverse=True)
        oldest = (time.time() if now is None else now) - KEEP_S
        old = [path for number, (at, path) in enumerate(links) if number >= MOST or at < oldest]
        for path in old:
            with suppress(FileNotFoundError):
                os.unlink(path)
        return len(old)

    def _path(self, key: str) -> Path:
        return self._folder / sha256(key.encode()).hexdigest()
