"""Pass policies and versions on as a file, written by the ingester and watched by the workers."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from proxy.spool.folders import PRIVATE_MODE
from store.versions import PolicyVersion

log = structlog.get_logger()

FILE_NAME: Final = "policies.json"
WATCH_S: Final = 0.1


class VersionFile:
    """The file with the versions whose files exist, as the ingester last read them."""

    def __init__(self, spool_dir: Path) -> None:
        """Set the file's path in `spool_dir`; nothing is read yet."""
        self._path = spool_dir / FILE_NAME
        self._seen: tuple[int, int] | None = None

    def exists(self) -> bool:
        """Return whether there is a file: somebody may have removed it."""
        return self._path.exists()

    def write(self, versions: list[PolicyVersion]) -> None:
        """Replace the file atomically; make its folder if it is missing."""
        self._path.parent.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
        partial = self._path.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode(versions))
        partial.replace(self._path)

    def read(self) -> list[PolicyVersion] | None:
        """Return the versions in the file, or None if it is absent, unchanged or unreadable.

        Invalid content is logged once, and not read again until the file changes. A disk error is
        logged, and the next call reads again.
        """
        try:
            stat = self._path.stat()
            if self._seen == (stat.st_mtime_ns, stat.st_ino):
                return None
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.error("policies_unreadable", path=str(self._path), reason=str(error))
            return None
        self._seen = (stat.st_mtime_ns, stat.st_ino)
        try:
            return msgspec.json.decode(content, type=list[PolicyVersion])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # The versions known so far go on serving until the ingester writes the file again.
            log.error("policies_unreadable", path=str(self._path), reason=str(error))
            return None

    def take_if_changed(self, take: Callable[[list[PolicyVersion]], None]) -> None:
        """Call `take` with the versions if the file has changed since the last look."""
        versions = self.read()
        if versions is not None:
            take(versions)

    async def watch(self, take: Callable[[list[PolicyVersion]], None]) -> None:
        """Call `take_if_changed` every `WATCH_S` seconds; never return."""
        while True:
            self.take_if_changed(take)
            await asyncio.sleep(WATCH_S)


def serving_versions(versions: list[PolicyVersion]) -> dict[str, int]:
    """Return the serving version of each policy, by policy name."""
    return {version.name: version.version for version in versions if version.state == "serving"}
