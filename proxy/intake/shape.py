"""Limit the content of a parsed body, and the cost of parsing it (pure).

The numbers were measured: docs/decisions/030-limits-on-what-is-parsed.md.
"""

from typing import Final

from proxy.errors import BadRequest, TooLarge
from store.values.json_limits import MAX_DEPTH, Size, most_of, nests_too_deep, size_of

# Most lists and objects in one body: a conversation of 30,000 messages in parts. Most values of
# any kind: a prompt of a million token ids.
MAX_CONTAINERS: Final = 100_000
MAX_VALUES: Final = 1_000_000
MOST: Final = Size(MAX_CONTAINERS, MAX_VALUES)
# Memory that a container or a value takes in Python, in bytes (approximate).
CONTAINER_BYTES: Final = 200
VALUE_BYTES: Final = 60
# A body is in memory four times: as it came, as parsed text, as sent, and as recorded.
COPIES: Final = 4
# Above these sizes parsing takes longer than about 10 ms and is done beside the event loop.
LONG_BYTES: Final = 2**20
LONG_CONTAINERS: Final = 3_000
LONG_VALUES: Final = 30_000


def check_shape(body: bytes) -> Size:
    """Return an upper bound of the containers and values in a body, if it may be parsed.

    Raises:
        TooLarge: the body holds too many of them.
        BadRequest: the body nests too deep.
    """
    size = most_of(body)
    if _exceeds(size):
        # That count includes brackets and commas inside strings; count exactly before refusing.
        size = size_of(body, MOST)
        if _exceeds(size):
            raise TooLarge(
                f"The body holds more than {MAX_CONTAINERS} lists and objects, or more than "
                f"{MAX_VALUES} values, which is the most that this proxy reads. Send less in one "
                "request",
                code="too_many_values",
            )
    check_depth(body, size)
    return size


def check_depth(body: bytes, size: Size) -> None:
    """Check that a body, which holds at most `size`, does not nest too deep to be parsed.

    Raises:
        BadRequest: the body nests too deep.
    """
    if size.containers > MAX_DEPTH and nests_too_deep(body):
        raise BadRequest(
            f"The body nests lists and objects more than {MAX_DEPTH} deep, which is the most "
            "that this proxy reads. Send a flatter body",
            code="nested_too_deep",
        )


def cost_of(body: bytes, size: Size) -> int:
    """Estimate the memory that a body takes until its call has ended, in bytes."""
    parsed = CONTAINER_BYTES * size.containers + VALUE_BYTES * size.values
    return COPIES * len(body) + parsed


def takes_long(body: bytes, size: Size) -> bool:
    """Return whether parsing the body would hold up other calls on the event loop."""
    return len(body) > LONG_BYTES or size.containers > LONG_CONTAINERS or size.values > LONG_VALUES


def _exceeds(size: Size) -> bool:
    return size.containers > MAX_CONTAINERS or size.values > MAX_VALUES
