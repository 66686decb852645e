"""Report the drain's state to `/readyz` and the metrics (pure, except for its clock)."""

from collections.abc import Callable
from time import monotonic
from typing import Final, Literal

State = Literal["moving", "waiting", "stuck"]
MOST_REASON: Final = 200


class Progress:
    """Tell the drain's present state, since when, and why.

    `moving`: records are being stored, or there are none. `waiting`: PostgreSQL is away, and
    records wait on disk, as intended. `stuck`: something else keeps a record from being stored,
    though perhaps not all. It lasts until all move again: an outage in between does not end it.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """Begin as `moving`; `clock` returns seconds."""
        self._clock = clock
        self._since = clock()
        self._stuck_since: float | None = None
        self.state: State = "moving"
        self.reason = ""
        # Number of records that are passed over for now.
        self.held = 0

    def note(self, state: State, reason: str = "") -> None:
        """Set the state after a look at the spool."""
        if state != self.state:
            self._since = self._clock()
        if state == "moving":
            self._stuck_since = None
        elif state == "stuck":
            self._stuck_since = self._since = self._stuck_since or self._since
        self.state, self.reason = state, reason[:MOST_REASON]

    @property
    def stuck_s(self) -> float:
        """Return for how many seconds the drain has been stuck; 0 if it is not."""
        return self._clock() - self._since if self.state == "stuck" else 0.0

    def told(self) -> dict[str, object]:
        """Return the state as an object for `/readyz`."""
        return {
            "state": self.state,
            "for_s": round(self._clock() - self._since, 1),
            "reason": self.reason,
            "held": self.held,
        }
