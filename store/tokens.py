"""Token ids and log-probabilities as the store keeps them: little-endian int32 and float32."""

import sys
from array import array
from collections.abc import Iterable
from typing import Final, TypeVar

# Of one id, or one log-probability.
ITEM_BYTES: Final = 4

Values = TypeVar("Values", "array[int]", "array[float]")


def pack_ids(ids: Iterable[int]) -> bytes:
    """Ids (T,) as int32.

    Raises:
        OverflowError: an id does not fit into 32 bits.
    """
    return _little_endian(array("i", ids)).tobytes()


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Log-probabilities (T,), nats, as float32: the precision the server computed them in."""
    return _little_endian(array("f", logprobs)).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    return _little_endian(array("i", data)).tolist()


def unpack_logprobs(data: bytes) -> list[float]:
    """The inverse of `pack_logprobs`, to float32's precision."""
    return _little_endian(array("f", data)).tolist()


def _little_endian(values: Values) -> Values:
    if sys.byteorder == "big":
        values.byteswap()
    return values
