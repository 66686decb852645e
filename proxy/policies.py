"""Who serves, as a file: written by the keeper, watched by the workers."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from store.records import PolicyVersion

log = structlog.get_logger()

NAME: Final = "policies.json"
WATCH_S: Final = 0.1


class PolicyFile:
    """All versions of all policies, as the store last said."""

    def __init__(self, spool_dir: Path) -> None:
        self._path = spool_dir / NAME
        self._seen: tuple[int, int] | None = None

    def write(self, versions: list[PolicyVersion]) -> None:
        """Replace the file as a whole."""
        partial = self._path.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode(versions))
        partial.replace(self._path)

    def read(self) -> list[PolicyVersion] | None:
        """What it says; None if it has not changed since it was read last, or says nothing.

        A file that cannot be read is told of once, and waited out.
        """
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return None
        if self._seen == (stat.st_mtime_ns, stat.st_ino):
            return None
        content = self._path.read_bytes()
        self._seen = (stat.st_mtime_ns, stat.st_ino)
        try:
            return msgspec.json.decode(content, type=list[PolicyVersion])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # Who serves stays as it was last known; the keeper writes the file anew.
            log.error("policies_unreadable", path=str(self._path), reason=str(error))
            return None

    async def watch(self, take: Callable[[list[PolicyVersion]], None]) -> None:
        """For ever: hand on what it says, whenever that changes."""
        while True:
            try:
                versions = self.read()
            except OSError as error:
                # Who serves stays as it was last known; the next look may be luckier.
                log.error("policies_unreadable", path=str(self._path), reason=str(error))
            else:
                if versions is not None:
                    take(versions)
            await asyncio.sleep(WATCH_S)


def serving_of(versions: list[PolicyVersion]) -> dict[str, int]:
    """The version that new episodes of each policy get."""
    return {version.name: version.version for version in versions if version.state == "serving"}
