"""What one text adds to another: a shared beginning, a shared end, and what is between (pure).

A later request of a thread repeats the earlier one's messages before, and its tools and
settings after, what it adds: two lengths and the bytes between them are the whole of it.
"""

from typing import Final, NamedTuple

# Below this a reference to the parent costs as much as it saves.
LEAST_SHARED: Final = 64


class Delta(NamedTuple):
    """`prefix` and `suffix` count the bytes taken from the base's two ends."""

    prefix: int
    suffix: int
    middle: bytes


def shared_prefix(base: bytes, data: bytes) -> int:
    """How many bytes both begin with: bisection, each byte is compared about once."""
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
    """How many bytes, `most` of them, both end with."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if base[len(base) - middle : len(base) - low] == data[len(data) - middle : len(data) - low]:
            low = middle
        else:
            high = middle - 1
    return low


def delta(base: bytes, data: bytes) -> Delta:
    """`data` as what it adds to `base`; the two ends never overlap in either."""
    prefix = shared_prefix(base, data)
    suffix = shared_suffix(base, data, min(len(base), len(data)) - prefix)
    return Delta(prefix, suffix, data[prefix : len(data) - suffix])


def rebuild(base: bytes, prefix: int, suffix: int, middle: bytes) -> bytes:
    """The text that `delta` was made of.

    Raises:
        ValueError: the base is shorter than what is to be taken from it, or less than nothing is.
    """
    if min(prefix, suffix) < 0 or prefix + suffix > len(base):
        raise ValueError(f"{prefix} + {suffix} bytes are to come from a base of {len(base)}")
    return base[:prefix] + middle + base[len(base) - suffix :]
