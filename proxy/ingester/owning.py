"""Know whose each policy is, as the file of policies says now.

Workers are replaced when the file is to be read again, and the ingester is not.
"""

from collections.abc import Iterable
from pathlib import Path

import structlog

from proxy.policies.owners import Owners
from store.errors import BadPolicies
from store.policy_table import open_policies
from store.versions import PolicyVersion

log = structlog.get_logger()


# What a file is known by: time of change, inode and size (one that is written in place may change
# twice within a tick of the disk's clock); a word where there is none, or none was read.
Mark = tuple[int, int, int] | str


class OwnersFile:
    """Read the owners of policies again whenever their file changes."""

    def __init__(self, path: Path | None) -> None:
        """Store where the file is; the first look reads it."""
        self._path = path
        self._seen: Mark = "unread"
        self._trouble = ""
        self._owners = Owners(None)

    def now(self, versions: Iterable[PolicyVersion]) -> Owners:
        """Return the owners, of the store's `versions` too.

        If the file cannot be used, which is logged once, they are those that it named last, and the
        next look tries again: what the disk refuses now it may give then.
        """
        # Taken before reading: a file that is replaced in between is read again at the next look.
        mark = self._mark()
        if mark != self._seen:
            try:
                self._owners = Owners(open_policies(self._path))
                self._seen, self._trouble = mark, ""
            except BadPolicies as error:
                # What the ingester has to do besides must not wait for the file.
                if str(error) != self._trouble:
                    log.error("owners_unreadable", reason=str(error))
                self._trouble = str(error)
        self._owners.learn(versions)
        return self._owners

    def _mark(self) -> Mark:
        if self._path is None:
            return "none"
        try:
            status = self._path.stat()
        except OSError:
            return "lost"
        return status.st_mtime_ns, status.st_ino, status.st_size
