"""Set deadlines for a client, and measure its progress against them (pure).

No deadline has a timer of its own: a sweep looks at every connection now and then and checks
whether it made progress. A deadline is late by at most two sweeps, which nobody notices.
"""

from typing import Final

import msgspec

# Bytes of a body, either way, that count as progress. A limit on the whole body would hit a large
# file on a slow line; a limit on silence alone would let one byte a minute hold a connection.
STEP: Final = 16 * 1024
# Seconds after which an idle connection is closed.
IDLE_S: Final = 75.0
SOONEST_S: Final = 0.05
LATEST_S: Final = 5.0


class ClientDeadlines(msgspec.Struct, frozen=True):
    """Limit the seconds that a client may take for a head, and for each `STEP` bytes of a body.

    `write_s` counts only while there are bytes that the client could take.
    """

    head_s: float = 60.0
    body_s: float = 300.0
    write_s: float = 300.0
    idle_s: float = IDLE_S

    def at_most(self, seconds: float) -> "ClientDeadlines":
        """Return the same deadlines, but none longer than `seconds`."""
        return ClientDeadlines(
            head_s=min(self.head_s, seconds),
            body_s=min(self.body_s, seconds),
            write_s=min(self.write_s, seconds),
            idle_s=min(self.idle_s, seconds),
        )

    @property
    def sweep_s(self) -> float:
        """Return the seconds between two looks at the connections."""
        shortest = min(self.head_s, self.body_s, self.write_s, self.idle_s)
        return min(max(shortest / 10, SOONEST_S), LATEST_S)


class Clock:
    """Measure for how long a count has not grown by a step."""

    __slots__ = ("_count", "_since")

    def __init__(self) -> None:
        """Begin with nothing awaited."""
        self._count = -1
        self._since = 0.0

    def reset(self) -> None:
        """Begin again with the next look: nothing is being waited for."""
        self._count = -1

    def waited(self, now: float, count: int, step: int = 1) -> float:
        """Return the seconds since the count last grew by `step`, as far as looks have shown."""
        if self._count < 0 or count - self._count >= step:
            self._count = count
            self._since = now
        return now - self._since
