"""Make blocks of shared memory in the supervisor: named numbers that outlive a process.

A block is an anonymous file in memory (memfd_create(2)). It has no name in any file system, so
that no disk can be too full for it, and it is gone when its last process is. Each process that
counts holds one block; its numbers stay there for the process that takes the block next.

Layout, little-endian: eight bytes with the number of bytes in use. Then for each number the length
of its name (four bytes), the name, spaces up to a multiple of eight bytes, and two doubles: the
value, and the time at which it was set.
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
_pack: Final = _NUMBER.pack_into
# A kernel may require this flag (sysctl vm.memfd_noexec); kernels before 6.3 refuse it.
_MFD_NOEXEC_SEAL: Final = 0x0008


class NoBlock(Exception):
    """Report that every block is held by a process that is alive."""


class Number(NamedTuple):
    """Name a number in a block, with its value."""

    name: str
    value: float
    set_at: float


def make_block(name: str) -> int:
    """Return the descriptor of a new, empty block; `name` is shown in /proc only."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:
        return os.memfd_create(name, os.MFD_CLOEXEC)


def read_block(block: int) -> Iterator[Number]:
    """Yield all numbers of a block, whether or not a process holds it."""
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
    """Return whether a living process holds a block."""
    handle = _reopen(block)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def take_block(blocks: Sequence[int]) -> "Block":
    """Take the first block that no process holds; wait up to `WAIT_S` for one.

    Raises:
        NoBlock: living processes hold them all.
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
        # A block may be locked for a moment by `is_held`, or its process may be about to end.
        if time.monotonic() > deadline:
            raise NoBlock(f"all {len(blocks)} blocks are held by running processes")
        time.sleep(0.02)


class Block:
    """Keep numbers in a block that this process holds for as long as it lives."""

    def __init__(self, handle: int) -> None:
        """Map the block that `handle` has locked, and find the numbers that are in it.

        Raises:
            OSError: the machine has no memory for it.
        """
        self._handle = handle
        size = os.fstat(handle).st_size
        if size == 0:
            size = START_BYTES
            # Allocated at once: writing to a mapped page that has no memory would kill the process.
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
        """Return the names of all numbers in the block."""
        return list(self._places)

    def place(self, name: str) -> int:
        """Return the offset of a number, which is created with the value 0 if it is missing.

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
        # Written last, so that a kill at any moment leaves a consistent block.
        self._used = at + _NUMBER.size
        self._map[: _USED.size] = _USED.pack(self._used)
        self._places[name] = at
        return at

    def get(self, place: int) -> float:
        """Return the value at offset `place`."""
        value: float = _NUMBER.unpack_from(self._map, place)[0]
        return value

    def set(self, place: int, value: float, at: float = 0.0) -> None:
        """Set the value at offset `place`, and `at` as the time it was set."""
        _pack(self._map, place, value, at)

    def _grow(self, needed: int) -> None:
        size = len(self._map)
        if needed <= size:
            return
        while size < needed:
            size *= 2
        os.posix_fallocate(self._handle, 0, size)
        self._map = mmap.mmap(self._handle, size)


def _padded(length: int) -> int:
    """Return how many bytes a name of `length` bytes takes with its length field and padding."""
    return (_LENGTH.size + length + 7) // 8 * 8


def _reopen(block: int) -> int:
    """Open a block anew, so that it can be locked for this process alone.

    A flock(2) lock belongs to the open file, and the inherited one is shared by all processes.
    """
    return os.open(f"/proc/self/fd/{block}", os.O_RDWR | os.O_CLOEXEC)
