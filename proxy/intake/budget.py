"""Budget the memory of requests and replies in flight at one worker (pure bookkeeping).

A request claims room before it is read, and as it grows; if there is none, it is refused. A reply
is charged without being asked, because the model has done the work already.

Two kinds of request are admitted past the limit, so that the budget shuts nobody out for good:
one large request while there is no other large one, however small the budget is; and small
requests up to a quarter of the budget in all, whatever else is in flight.
"""

from types import TracebackType
from typing import Final

from proxy.errors import Overloaded

# Largest claim in bytes that counts as small: an ordinary call with a megabyte of conversation.
SMALL: Final = 4 * 2**20
# One part in so many of the budget is set aside for small requests.
SET_ASIDE: Final = 4


class Budget:
    """Limit the bytes that all requests and replies in flight may hold together."""

    def __init__(self, limit: int) -> None:
        """Begin with nothing held of `limit` bytes."""
        self.limit = limit
        # Of a small budget less is small: what is small must fit in what is set aside.
        self.small = min(SMALL, limit // SET_ASIDE)
        self.used = 0
        self._small = 0
        self._large_claims = 0

    def claim(self) -> "Claim":
        """Return one request's claim: a context manager that gives all of it back at its end."""
        return Claim(self)

    def _admits(self, held: int, wanted: int) -> bool:
        if self.used - held + wanted <= self.limit:
            return True
        if wanted <= self.small:
            return self._small - held + wanted <= self.limit // SET_ASIDE
        return self._large_claims == (1 if held > self.small else 0)

    def _move(self, held: int, now: int) -> None:
        """Change one claim from `held` to `now` bytes."""
        change = now - held
        self.used += change
        if held <= self.small >= now:
            self._small += change
            return
        if held <= self.small:
            self._small -= held
        else:
            self._large_claims -= 1
        if now <= self.small:
            self._small += now
        else:
            self._large_claims += 1


class Claim:
    """Hold one request's part of the budget: `held` bytes."""

    __slots__ = ("_budget", "held")

    def __init__(self, budget: Budget) -> None:
        """Begin with 0 bytes of `budget`."""
        self._budget = budget
        self.held = 0

    def __enter__(self) -> "Claim":
        """Return the claim itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give all of it back."""
        self.release()

    def ask(self, size: int) -> None:
        """Claim at least `size` bytes in all.

        Raises:
            Overloaded: there is no room for them now; the claim stays as it was.
        """
        if size > self.held:
            if not self._budget._admits(self.held, size):
                raise Overloaded(
                    "Requests in flight fill the memory that PAWL_IN_FLIGHT_MB allows. Send the "
                    "request again in a moment",
                    code="overloaded",
                )
            self._set(size)

    def add(self, size: int) -> None:
        """Charge `size` bytes more, whether or not there is room."""
        if size:
            self._set(self.held + size)

    def release(self) -> None:
        """Give all of it back."""
        if self.held:
            self._set(0)

    def _set(self, size: int) -> None:
        self._budget._move(self.held, size)
        self.held = size
