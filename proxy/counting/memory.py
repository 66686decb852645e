"""Blocks of memory that the supervisor makes and hands down: named numbers that outlive a process.

A block is an anonymous file in memory (`memfd_create`): it has no name in any file system, so
that no disk can be too full for it and nothing is left behind when all its processes are gone.
Who counts holds one block at a time; what was counted stays in it for whoever takes it next.

Layout: eight bytes with how much is used, then for each number the length of its name (four
bytes), the name, spaces up to a multiple of eight bytes, and two doubles: the value, and when it
was set.
"""

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

START_BYTES: Final = 64 * 1024
WAIT_S: Final = 5.0
_USED: Final = struct.Struct("<Q")
_LENGTH: Final = struct.Struct("<I")
_NUMBER: Final = struct.Struct("<dd")
# The kernel may insist on it (vm.memfd_noexec); older ones do not know it.
_MFD_NOEXEC_SEAL: Final = 0x0008


class NoBlock(Exception):
    """Every block is held by a process that is alive."""


class Number(NamedTuple):
    """A number in a block."""

    name: str
    value: float
    set_at: float


def make_block(name: str) -> int:
    """Return the descriptor of a new, empty block; `name` is seen in /proc alone."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:
        return os.memfd_create(name, os.MFD_CLOEXEC)


def read_block(block: int) -> Iterator[Number]:
    """Yield all numbers of a block, whoever holds it."""
    head = os.pread(block, _USED.size, 0)
    if not head:
        return
    [used] = _USED.unpack(head)
    data = os.pread(block, used, 0)
    at = _USED.size
    while at < len(data):
        [length] = _LENGTH.unpack_from(data, at)
        name = data[at + _LENGTH.size : at + _LENGTH.size + length].decode()
        at += _padded(length)
        yield Number(name, *_NUMBER.unpack_from(data, at))
        at += _NUMBER.size


def is_held(block: int) -> bool:
    """Say whether the process that counts in a block is alive."""
    handle = _reopen(block)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def take_block(blocks: Sequence[int]) -> "Block":
    """Hold the first block that nobody holds.

    Raises:
        NoBlock: there is none.
    """
    deadline = time.monotonic() + WAIT_S
    while True:
        for block in blocks:
            handle = _reopen(block)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
            else:
                return Block(handle)
        # One may be looked at just now, or be a process's that is about to end.
        if time.monotonic() > deadline:
            raise NoBlock(f"all {len(blocks)} blocks are held")
        time.sleep(0.02)


class Block:
    """A block that this process holds for as long as it lives."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        size = os.fstat(handle).st_size
        if size == 0:
            size = START_BYTES
            # All of it is there from now on: touching it cannot fail later.
            os.posix_fallocate(handle, 0, size)
        self._map = mmap.mmap(handle, size)
        [used] = _USED.unpack_from(self._map)
        self._used = max(used, _USED.size)
        self._places: dict[str, int] = {}
        at = _USED.size
        while at < self._used:
            [length] = _LENGTH.unpack_from(self._map, at)
            name = self._map[at + _LENGTH.size : at + _LENGTH.size + length].decode()
            at += _padded(length)
            self._places[name] = at
            at += _NUMBER.size

    @property
    def names(self) -> list[str]:
        """The names of all numbers in it."""
        return list(self._places)

    def place(self, name: str) -> int:
        """Return where a number is; it is 0 if it was not there before.

        Raises:
            OSError: the machine has no more memory for it.
        """
        if name in self._places:
            return self._places[name]
        raw = name.encode()
        at: int = self._used + _padded(len(raw))
        self._grow(at + _NUMBER.size)
        self._map[self._used : at] = _LENGTH.pack(len(raw)) + raw.ljust(
            _padded(len(raw)) - _LENGTH.size
        )
        self._map[at : at + _NUMBER.size] = _NUMBER.pack(0.0, 0.0)
        # Last, so that a kill at any moment leaves a whole block.
        self._used = at + _NUMBER.size
        self._map[: _USED.size] = _USED.pack(self._used)
        self._places[name] = at
        return at

    def get(self, place: int) -> float:
        """Return the value there."""
        value: float = _NUMBER.unpack_from(self._map, place)[0]
        return value

    def set(self, place: int, value: float, at: float) -> None:
        """Set the value there, as of `at`."""
        self._map[place : place + _NUMBER.size] = _NUMBER.pack(value, at)

    def _grow(self, needed: int) -> None:
        size = len(self._map)
        if needed <= size:
            return
        while size < needed:
            size *= 2
        os.posix_fallocate(self._handle, 0, size)
        self._map = mmap.mmap(self._handle, size)


def _padded(length: int) -> int:
    """Return the bytes that a name's length, the name and its padding take."""
    return (_LENGTH.size + length + 7) // 8 * 8


def _reopen(block: int) -> int:
    """Open a block anew: a lock belongs to what was opened, and ours is everybody's."""
    return os.open(f"/proc/self/fd/{block}", os.O_RDWR | os.O_CLOEXEC)
