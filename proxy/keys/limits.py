"""Hold each key to its limits, within one worker (pure: the caller has the clock)."""

import math
from collections import deque
from typing import Final

from store.keys.grants import Grant

WINDOW_S: Final = 60.0
# When to send again what was refused because too many requests run: any of them may end at once.
BUSY_S: Final = 1


def share_of(limit: int | None, workers: int) -> int | None:
    """Return one worker's share of a limit, rounded up, so that no key is locked out."""
    return None if limit is None else math.ceil(limit / workers)


class Usage:
    """Count what one key uses at one worker: requests that run, and those of the last minute.

    Of calls it counts the tokens, too, once they have ended.
    """

    __slots__ = ("_at_once", "_begun", "_per_minute", "_running", "_spent", "_taken", "_tokens")

    def __init__(self) -> None:
        """Begin without a request, and without limits."""
        self._per_minute: int | None = None
        self._at_once: int | None = None
        self._tokens: int | None = None
        self._begun: deque[float] = deque()
        self._running = 0
        # When calls of the last minute ended, with the tokens of each; and the sum of these.
        self._taken: deque[tuple[float, int]] = deque()
        self._spent = 0

    @property
    def counts_tokens(self) -> bool:
        """Return whether the key has a limit of tokens: only then are they worth counting."""
        return self._tokens is not None

    def hold_to(self, grant: Grant, workers: int) -> None:
        """Take the limits of a key, of which `workers` workers have a share each."""
        self._per_minute = share_of(grant.per_minute, workers)
        self._at_once = share_of(grant.at_once, workers)
        self._tokens = share_of(grant.tokens_per_minute, workers)
        if self._per_minute is None:
            self._begun.clear()
        if self._tokens is None:
            self._taken.clear()
            self._spent = 0

    def begin(self, now: float, *, takes_tokens: bool = True) -> int | None:
        """Count a request that begins, or return after how many seconds to send it again.

        `now` is in seconds on any clock that only goes on. What is refused does not count. A
        request that takes no tokens is held to the other limits only.
        """
        if self._at_once is not None and self._running >= self._at_once:
            return BUSY_S
        wait_s = self._until_tokens(now) if takes_tokens else None
        if wait_s is not None:
            return wait_s
        if self._per_minute is not None:
            begun = self._begun
            while begun and begun[0] <= now - WINDOW_S:
                begun.popleft()
            if len(begun) >= self._per_minute:
                # Once the request before the last `per_minute` - 1 is a minute old.
                return _until_old(begun[-self._per_minute], now)
            begun.append(now)
        self._running += 1
        return None

    def _until_tokens(self, now: float) -> int | None:
        """Return after how many seconds fewer tokens count than the limit; None: they do now."""
        if self._tokens is None:
            return None
        taken = self._taken
        while taken and taken[0][0] <= now - WINDOW_S:
            self._spent -= taken.popleft()[1]
        left = self._spent
        wait_s = None
        for at, tokens in taken:
            if left < self._tokens:
                break
            left -= tokens
            wait_s = _until_old(at, now)
        return wait_s

    def spend(self, now: float, tokens: int) -> None:
        """Count the tokens of a call that has ended."""
        if self._tokens is not None and tokens:
            self._taken.append((now, tokens))
            self._spent += tokens

    def end(self) -> None:
        """Count a request that has ended, however it did."""
        self._running -= 1


def _until_old(at: float, now: float) -> int:
    """Return after how many whole seconds `at` is a minute old."""
    # Sums of seconds are rounded, so it is looked up as it will be looked at then.
    wait_s = math.ceil(at + WINDOW_S - now)
    return wait_s if at <= now + wait_s - WINDOW_S else wait_s + 1
