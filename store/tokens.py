"""Token ids and log-probabilities as the store keeps them: little-endian int32 and float32."""

import sys
from array import array
from collections.abc import Iterable
from typing import Final, TypeVar

# Of one id, or one log-probability.
ITEM_BYTES: Final = 4
# vLLM says this where a log-probability is -inf, which JSON has no word for.
NO_LOGPROB: Final = -9999.0
# A softmax in float32 may give a hair more than a probability of 1.
ROUNDING: Final = 1e-3

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


def are_logprobs(data: bytes) -> bool:
    """Return whether each packed value is one that a sampled token can have."""
    return may_be_sampled(unpack_logprobs(data))


def may_be_sampled(logprobs: Iterable[float]) -> bool:
    """Return whether each is the log-probability of a token that can be sampled.

    False for NaN, for what stands for -inf, and for a probability past 1.
    """
    return all(NO_LOGPROB < value <= ROUNDING for value in logprobs)


def _little_endian(values: Values) -> Values:
    if sys.byteorder == "big":
        values.byteswap()
    return values
