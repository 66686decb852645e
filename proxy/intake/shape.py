"""How much a body may hold that is parsed, and what it costs (pure).

The numbers were measured: docs/decisions/030-limits-on-what-is-parsed.md.
"""

from typing import Final

from proxy.errors import BadRequest, TooLarge
from store.json_limits import MAX_DEPTH, Size, most_of, nests_too_deep, size_of

# Lists and objects in one body, and values of any kind: a conversation of 30,000 messages in
# parts; a prompt of a million token ids.
MAX_CONTAINERS: Final = 100_000
MAX_VALUES: Final = 1_000_000
MOST: Final = Size(MAX_CONTAINERS, MAX_VALUES)
# What one of them takes in Python, about, in bytes.
CONTAINER_BYTES: Final = 200
VALUE_BYTES: Final = 60
# A body is there as it came, as parsed text, as it is sent and as it is recorded.
COPIES: Final = 4
# What takes longer than some 10 ms to read is read beside the event loop.
LONG_BYTES: Final = 2**20
LONG_CONTAINERS: Final = 3_000
LONG_VALUES: Final = 30_000


def check_shape(body: bytes) -> Size:
    """Return an upper bound of what is to be parsed of a body that may be.

    Raises:
        TooLarge: it holds more than may be parsed.
        BadRequest: it nests too deep.
    """
    size = most_of(body)
    if _exceeds(size):
        # Brackets and commas in texts were counted too: now exactly.
        size = size_of(body, MOST)
        if _exceeds(size):
            raise TooLarge(
                f"The body holds more than {MAX_CONTAINERS} lists and objects, or more than "
                f"{MAX_VALUES} values, which is at most what this proxy reads. Send less in one "
                "request",
                code="too_many_values",
            )
    check_depth(body, size)
    return size


def check_depth(body: bytes, size: Size) -> None:
    """See to it that a body, of at most this size, can be parsed.

    Raises:
        BadRequest: it nests too deep.
    """
    if size.containers > MAX_DEPTH and nests_too_deep(body):
        raise BadRequest(
            f"The body nests lists and objects more than {MAX_DEPTH} deep, which is the most "
            "that this proxy reads. Send it flatter",
            code="nested_too_deep",
        )


def cost_of(body: bytes, size: Size) -> int:
    """Return what a body takes in memory until its call has ended, about, in bytes."""
    parsed = CONTAINER_BYTES * size.containers + VALUE_BYTES * size.values
    return COPIES * len(body) + parsed


def takes_long(body: bytes, size: Size) -> bool:
    """Whether other calls would notice if the event loop read it."""
    return len(body) > LONG_BYTES or size.containers > LONG_CONTAINERS or size.values > LONG_VALUES


def _exceeds(size: Size) -> bool:
    return size.containers > MAX_CONTAINERS or size.values > MAX_VALUES
