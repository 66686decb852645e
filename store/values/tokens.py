"""Pack token ids and log-probabilities as the store keeps them: little-endian int32 and float32."""

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from math import isnan
from typing import Final, TypeVar

# Bytes of one id or one log-probability.
ITEM_BYTES: Final = 4
# vLLM sends this value for a log-probability of -inf, which JSON cannot express.
NO_LOGPROB: Final = -9999.0
# In float32, rounding in the softmax may give a probability slightly above 1.
ROUNDING: Final = 1e-3

Values = TypeVar("Values", "array[int]", "array[float]")


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack token ids (T,) as int32.

    Raises:
        struct.error: an id does not fit into 32 bits.
    """
    values = tuple(ids)
    # It takes half the time that an array takes.
    return struct.pack(f"<{len(values)}i", *values)


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Pack log-probabilities (T,), nats, as float32: the precision the server computed them in."""
    return _little_endian(array("f", logprobs)).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Unpack token ids (T,) that `pack_ids` packed.

    Raises:
        ValueError: the length is not a multiple of `ITEM_BYTES`.
    """
    return _little_endian(array("i", data)).tolist()


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
    # Of NaN neither min() nor max() tells, but a sum with one in it is NaN.
    return min(logprobs) > NO_LOGPROB and max(logprobs) <= ROUNDING and not isnan(sum(logprobs))


def _little_endian(values: Values) -> Values:
    if sys.byteorder == "big":
        values.byteswap()
    return values
