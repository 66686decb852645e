"""Room in memory for what is in flight at one worker (pure bookkeeping).

A request asks for room before it is read, and as it grows; a reply is charged without being
asked, for the model has worked already. What finds no room is refused; what is there stays.

Two things are always let in, so that a budget shuts nobody out for good: one large request
where there is no other (however small the budget is), and small ones up to a quarter of the
budget beside whatever else there is.
"""

from types import TracebackType
from typing import Final

from proxy.errors import Overloaded

# What costs no more than this is small: an ordinary call with a megabyte of conversation.
SMALL: Final = 4 * 2**20
SET_ASIDE: Final = 4


class Budget:
    """So many bytes for all that is in flight."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Of a small budget less is small: what is small must fit in what is set aside.
        self.small = min(SMALL, limit // SET_ASIDE)
        self.used = 0
        self._small = 0
        self._large_claims = 0

    def claim(self) -> "Claim":
        """Begin one request's claim, which is given back when its block is left."""
        return Claim(self)

    def _admits(self, held: int, wanted: int) -> bool:
        if self.used - held + wanted <= self.limit:
            return True
        if wanted <= self.small:
            return self._small - held + wanted <= self.limit // SET_ASIDE
        return self._large_claims == (1 if held > self.small else 0)

    def _move(self, held: int, now: int) -> None:
        """One claim of `held` bytes is one of `now` bytes."""
        self.used += now - held
        for size, sign in ((held, -1), (now, 1)):
            if size > self.small:
                self._large_claims += sign
            else:
                self._small += sign * size


class Claim:
    """What one request holds of the budget."""

    __slots__ = ("_budget", "held")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.held = 0

    def __enter__(self) -> "Claim":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def ask(self, size: int) -> None:
        """Hold at least `size` bytes in all.

        Raises:
            Overloaded: there is no room for them now; what was held stays held.
        """
        if size > self.held:
            if not self._budget._admits(self.held, size):
                raise Overloaded(
                    "This proxy holds as much in memory as PAWL_IN_FLIGHT_MB allows. Send the "
                    "request again in a moment",
                    code="overloaded",
                )
            self._set(size)

    def add(self, size: int) -> None:
        """Hold `size` bytes more, whether or not there is room."""
        self._set(self.held + size)

    def release(self) -> None:
        """Give all of it back."""
        self._set(0)

    def _set(self, size: int) -> None:
        self._budget._move(self.held, size)
        self.held = size
