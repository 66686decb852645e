"""Does the drain move? What `/readyz` says of it (pure but for the clock it is given)."""

from collections.abc import Callable
from time import monotonic
from typing import Final, Literal

State = Literal["moving", "waiting", "stuck"]
MOST_REASON: Final = 200


class Progress:
    """The drain's present state, since when, and why.

    `moving`: what is on disk is stored, or there is nothing. `waiting`: PostgreSQL is away, and
    records wait on disk, as they should. `stuck`: something else keeps them there.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self.state: State = "moving"
        self.reason = ""
        # Records that are passed over for now, while others are stored.
        self.held = 0

    def note(self, state: State, reason: str = "") -> None:
        """Take what the last look at the spool came to."""
        if state != self.state:
            self._since = self._clock()
        self.state, self.reason = state, reason[:MOST_REASON]

    @property
    def stuck_s(self) -> float:
        """For how long nothing has moved that should; 0 where it does."""
        return self._clock() - self._since if self.state == "stuck" else 0.0

    def told(self) -> dict[str, object]:
        """Return it for people and scripts."""
        return {
            "state": self.state,
            "for_s": round(self._clock() - self._since, 1),
            "reason": self.reason,
            "held": self.held,
        }
