"""Encode byte strings as deltas: a shared prefix, a shared suffix, and the bytes between (pure).

A later request of a thread repeats the earlier request's messages before the bytes that it
adds, and its tools and settings after them. Two lengths and the added bytes describe it fully.
"""

from typing import Final, NamedTuple

# With fewer shared bytes, a reference to the parent costs as much as it saves.
LEAST_SHARED: Final = 64


class Delta(NamedTuple):
    """Express a byte string as an addition to a base.

    `prefix` and `suffix` count the bytes taken from the base's two ends.
    """

    prefix: int
    suffix: int
    middle: bytes


def shared_prefix(base: bytes, data: bytes) -> int:
    """Return how many bytes both begin with, by bisection: each is compared about once."""
    low, high = 0, min(len(base), len(data))
    if base[:high] == data[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if base[low:middle] == data[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_suffix(base: bytes, data: bytes, most: int) -> int:
    """Return how many bytes, `most` at the highest, both end with."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if base[len(base) - middle : len(base) - low] == data[len(data) - middle : len(data) - low]:
            low = middle
        else:
            high = middle - 1
    return low


def delta(base: bytes, data: bytes) -> Delta:
    """Return `data` as an addition to `base`; the two shared ends never overlap in either."""
    prefix = shared_prefix(base, data)
    suffix = shared_suffix(base, data, min(len(base), len(data)) - prefix)
    return Delta(prefix, suffix, data[prefix : len(data) - suffix])


def rebuild(base: bytes, prefix: int, suffix: int, middle: bytes) -> bytes:
    """Return the bytes that `delta` encoded.

    Raises:
        ValueError: a count is negative, or the base has fewer bytes than are to be taken from it.
    """
    if min(prefix, suffix) < 0 or prefix + suffix > len(base):
        raise ValueError(f"{prefix} + {suffix} bytes cannot be taken from a base of {len(base)}")
    return base[:prefix] + middle + base[len(base) - suffix :]
