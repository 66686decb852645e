"""Share among a proxy's workers which version an episode keeps, from the start of its first call.

An episode keeps the version of its first call. A worker remembers this for its own episodes; the
database knows it for all, but only once a call of the episode is stored. Before that, a second call
may reach another worker: a client calls in parallel, or workers are replaced. If a version was
promoted in between, that worker would choose it, and two versions would sample one episode. So the
first worker writes its choice into a table that all workers share, and the others follow it.

The table is a file in memory (the page). It is read and written with pread(2) and pwrite(2), which
fail where memory is short; a mapped page would kill the process then. It has `SET_COUNT` sets of
`SET_ENTRIES` entries, the newest first. An entry has, little-endian, a digest of policy and episode
(0 if it is free) and the version's number. A full set drops its oldest entry, whose episode is in
the database by then.
"""

import fcntl
import os
import struct
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

import structlog

log = structlog.get_logger()

SET_COUNT: Final = 32_768
SET_ENTRIES: Final = 8
# A set is locked for microseconds. A process that is suspended meanwhile must not block others.
LOCK_TRIES: Final = 100
PAUSE_S: Final = 0.0002
_DIGEST_BYTES: Final = 16
_ENTRY: Final = struct.Struct(f"<{_DIGEST_BYTES}sI")
_SET_BYTES: Final = SET_ENTRIES * _ENTRY.size
_SEPARATOR: Final = "\x1f"


class Locked(OSError):
    """Another process still held a set's lock at the last of `LOCK_TRIES` attempts."""


class SharedPins:
    """The versions of about the newest `SET_COUNT` × `SET_ENTRIES` episodes, shared by all workers.

    No public method raises: if the page cannot be used, a worker decides alone, and logs it.
    """

    def __init__(self, page: int) -> None:
        """Store the descriptor `page` of the open file."""
        self.page = page

    def pinned_version(self, policy: str, episode: str) -> int | None:
        """Return the version of `policy` that an episode keeps, or None if none is known."""
        digest, number = _digest_and_set(policy, episode)
        try:
            self._lock(number, fcntl.LOCK_SH)
            try:
                return _version_in(self._read(number), digest)
            finally:
                self._unlock(number)
        except OSError as error:
            _log_failure(error)
            return None

    def agree_on_version(
        self, policy: str, episode: str, version: int, is_servable: Callable[[int], bool]
    ) -> int:
        """Return the version that an episode keeps: the first that any worker proposed.

        This worker's proposal `version` is stored if there is none yet, or none servable any more.
        """
        digest, number = _digest_and_set(policy, episode)
        try:
            self._lock(number, fcntl.LOCK_EX)
            try:
                entries = self._read(number)
                kept = _version_in(entries, digest)
                if kept is not None and is_servable(kept):
                    return kept
                newest = _ENTRY.pack(digest, version) + _without_entry(entries, digest)
                os.pwrite(self.page, newest[:_SET_BYTES], number * _SET_BYTES)
            finally:
                self._unlock(number)
        except OSError as error:
            _log_failure(error)
        return version

    def _read(self, number: int) -> bytes:
        """Return the entries of set `number`, the newest first."""
        return os.pread(self.page, _SET_BYTES, number * _SET_BYTES)

    def _lock(self, number: int, kind: int) -> None:
        """Take the lock of set `number`; the kernel releases it if the process ends.

        Raises:
            Locked: others held it for too long.
            OSError: the kernel has no more locks.
        """
        for _ in range(LOCK_TRIES):
            try:
                fcntl.lockf(self.page, kind | fcntl.LOCK_NB, 1, number)
                return
            except (BlockingIOError, PermissionError):
                time.sleep(PAUSE_S)
        raise Locked(f"another worker still held the lock after {LOCK_TRIES} attempts")

    def _unlock(self, number: int) -> None:
        fcntl.lockf(self.page, fcntl.LOCK_UN, 1, number)


def _version_in(entries: bytes, digest: bytes) -> int | None:
    """Return the version in a set's entry for a digest, or None if it has no entry."""
    at = _entry_offset(entries, digest)
    if at < 0:
        return None
    version: int = _ENTRY.unpack_from(entries, at)[1]
    return version


def _without_entry(entries: bytes, digest: bytes) -> bytes:
    at = _entry_offset(entries, digest)
    return entries if at < 0 else entries[:at] + entries[at + _ENTRY.size :]


def _entry_offset(entries: bytes, digest: bytes) -> int:
    """Return the offset of the digest's entry in bytes; -1 if it has none."""
    at = entries.find(digest)
    while at % _ENTRY.size and at >= 0:
        # The match spans two other entries.
        at = entries.find(digest, at + 1)
    return at


def _digest_and_set(policy: str, episode: str) -> tuple[bytes, int]:
    """Return the digest of policy and episode, and the number of the set for its entry."""
    named = f"{policy}{_SEPARATOR}{episode}".encode(errors="surrogatepass")
    digest = blake2b(named, digest_size=_DIGEST_BYTES).digest()
    return digest, int.from_bytes(digest[:4], "little") % SET_COUNT


def _log_failure(error: OSError) -> None:
    log.warning("version_not_shared", reason=str(error))
