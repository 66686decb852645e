"""Pack a call's token ids and log-probabilities, and its request as a delta to another (pure).

Token ids and log-probabilities are little-endian int32 and float32. A later request of a thread
repeats the earlier request's messages before the bytes that it adds, and its tools and settings
after them: it is kept as a delta, which is two lengths and the added bytes.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from math import isnan
from typing import Final, NamedTuple, TypeVar

# Bytes of one id or one log-probability.
ITEM_BYTES: Final = 4
# vLLM sends this value for a log-probability of -inf, which JSON cannot express.
NO_LOGPROB: Final = -9999.0
# In float32, rounding in the softmax may give a probability slightly above 1.
ROUNDING_TOLERANCE: Final = 1e-3

Values = TypeVar("Values", "array[int]", "array[float]")


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack token ids (T,) as int32.

    Raises:
        struct.error: an id does not fit into 32 bits.
    """
    values = tuple(ids)
    # This takes half the time of an array.
    return struct.pack(f"<{len(values)}i", *values)


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Pack log-probabilities (T,), nats, as float32: the precision the server computed them in."""
    return _little_endian(array("f", logprobs)).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Unpack token ids (T,) that `pack_ids` packed.

    Raises:
        ValueError: the length is not a multiple of `ITEM_BYTES`.
    """
    return ids_array(data).tolist()


def ids_array(data: bytes) -> "array[int]":
    """Unpack token ids (T,) into an array of four bytes each, for millions of ids.

    Raises:
        ValueError: the length is not a multiple of `ITEM_BYTES`.
    """
    return _little_endian(array("i", data))


def unpack_logprobs(data: bytes) -> list[float]:
    """Unpack log-probabilities (T,), nats, that `pack_logprobs` packed, with float32's precision.

    Raises:
        ValueError: the length is not a multiple of `ITEM_BYTES`.
    """
    return _little_endian(array("f", data)).tolist()


def are_logprobs(data: bytes) -> bool:
    """Return whether each packed value can be the log-probability of a sampled token."""
    return may_be_sampled(unpack_logprobs(data))


def may_be_sampled(logprobs: Sequence[float]) -> bool:
    """Return whether each value can be the log-probability of a sampled token.

    NaN, `NO_LOGPROB` and values that mean a probability above 1 cannot.
    """
    if not logprobs:
        return True
    # min() and max() may miss a NaN, but a sum with a NaN is NaN.
    return (
        min(logprobs) > NO_LOGPROB
        and max(logprobs) <= ROUNDING_TOLERANCE
        and not isnan(sum(logprobs))
    )


def _little_endian(values: Values) -> Values:
    if sys.byteorder == "big":
        values.byteswap()
    return values


# With fewer shared bytes, a reference to the parent costs as much as it saves.
LEAST_SHARED_BYTES: Final = 64


class Delta(NamedTuple):
    """A byte string as an addition to a base.

    `prefix` and `suffix` are the numbers of bytes taken from the base's two ends.
    """

    prefix: int
    suffix: int
    middle: bytes


def shared_prefix(base: bytes, data: bytes) -> int:
    """Return the length of the shared prefix, by bisection: about one comparison a byte."""
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
    """Return the length of the shared suffix, at most `most`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if base[len(base) - middle : len(base) - low] == data[len(data) - middle : len(data) - low]:
            low = middle
        else:
            high = middle - 1
    return low


def delta(base: bytes, data: bytes) -> Delta:
    """Return `data` as an addition to `base`; prefix and suffix never overlap in either."""
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
