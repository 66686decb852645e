"""Limit the memory, size and parsing cost of a worker's requests.

A request claims memory before it is read, and as it grows; if there is none, it is refused. A reply
is charged even beyond the limit, because the model has done the work already. The numbers were
measured: docs/decisions/030-limits-on-what-is-parsed.md.

Two kinds of request are admitted beyond the limit, so that no request is refused forever: one large
request while there is no other large request, however small the budget is; and small requests up to
a quarter of the budget in all, whatever else is in flight.
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, TypeVar

from proxy.errors import BadRequest, Overloaded, ProxyError, TooLarge
from proxy.http.exchange import Exchange
from store.values.documents import MAX_DEPTH, Size, nests_too_deep, size_bound, size_of

# Largest claim in bytes that counts as small: an ordinary call with a megabyte of conversation.
SMALL_BYTES: Final = 4 * 2**20
# 1 / `RESERVED_DIVISOR` of the budget is kept for small requests.
RESERVED_DIVISOR: Final = 4
# Most lists and objects in one body: a conversation of 30,000 messages in parts. Most values of
# any kind: a prompt of a million token ids.
MAX_CONTAINERS: Final = 100_000
MAX_VALUES: Final = 1_000_000
MAX_SIZE: Final = Size(MAX_CONTAINERS, MAX_VALUES)
# Memory that a container or a value takes in Python, in bytes (approximate).
CONTAINER_BYTES: Final = 200
VALUE_BYTES: Final = 60
# A body is in memory four times: as it came, as parsed text, as sent, and as recorded.
COPIES: Final = 4
# Above these sizes parsing takes longer than about 10 ms and is done in a thread.
LONG_BYTES: Final = 2**20
LONG_CONTAINERS: Final = 3_000
LONG_VALUES: Final = 30_000


class Budget:
    """Limit the memory that all requests and replies in flight of one worker hold together."""

    def __init__(self, limit: int) -> None:
        """Begin unused; `limit` is in bytes."""
        self.limit = limit
        # A small budget lowers the bound: a small request must fit into the reserved part.
        self.small = min(SMALL_BYTES, limit // RESERVED_DIVISOR)
        self.used = 0
        self._small = 0
        self._large_claims = 0

    def claim(self) -> "BudgetShare":
        """Return a request's claim, 0 bytes at first: a context manager that releases it all."""
        return BudgetShare(self)

    def _admits(self, held: int, wanted: int) -> bool:
        if self.used - held + wanted <= self.limit:
            return True
        if wanted <= self.small:
            return self._small - held + wanted <= self.limit // RESERVED_DIVISOR
        return self._large_claims == (1 if held > self.small else 0)

    def _resize_claim(self, old: int, new: int) -> None:
        """Change the size of one request's claim from `old` to `new` bytes."""
        change = new - old
        self.used += change
        if old <= self.small >= new:
            self._small += change
            return
        if old <= self.small:
            self._small -= old
        else:
            self._large_claims -= 1
        if new <= self.small:
            self._small += new
        else:
            self._large_claims += 1


class BudgetShare:
    """The part of the budget that one request and its reply hold: `held` bytes."""

    __slots__ = ("_budget", "held")

    def __init__(self, budget: Budget) -> None:
        """Begin with 0 bytes of `budget`."""
        self._budget = budget
        self.held = 0

    def __enter__(self) -> "BudgetShare":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def claim_at_least(self, size: int) -> None:
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

    def charge(self, size: int) -> None:
        """Charge `size` bytes more, whether or not there is room."""
        if size:
            self._set(self.held + size)

    def release(self) -> None:
        """Release the whole claim."""
        if self.held:
            self._set(0)

    def _set(self, size: int) -> None:
        self._budget._resize_claim(self.held, size)
        self.held = size


def check_shape(body: bytes) -> Size:
    """Check that a body may be parsed; return an upper bound of its containers and values.

    Raises:
        TooLarge: the body holds too many containers or values.
        BadRequest: the body nests too deep.
    """
    size = size_within(body, MAX_SIZE)
    if size is None:
        raise TooLarge(
            f"The body holds more than {MAX_CONTAINERS} lists and objects, or more than "
            f"{MAX_VALUES} values, which is the most that this proxy reads. Send less in one "
            "request",
            code="too_many_values",
        )
    check_depth(body, size)
    return size


def size_within(body: bytes, most: Size) -> Size | None:
    """Return an upper bound of a body's containers and values, or None if it exceeds `most`."""
    size = size_bound(body)
    if _exceeds(size, most):
        # The bound includes brackets and commas inside strings; count exactly before refusing.
        size = size_of(body, most)
    return None if _exceeds(size, most) else size


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


def memory_cost_of(body: bytes, size: Size) -> int:
    """Estimate the memory that a body takes until its call has ended, in bytes."""
    parsed = CONTAINER_BYTES * size.containers + VALUE_BYTES * size.values
    return COPIES * len(body) + parsed


def takes_long(body: bytes, size: Size) -> bool:
    """Return whether parsing the body would hold up other calls on the event loop."""
    return len(body) > LONG_BYTES or size.containers > LONG_CONTAINERS or size.values > LONG_VALUES


def _exceeds(size: Size, most: Size) -> bool:
    return size.containers > most.containers or size.values > most.values


Result = TypeVar("Result")
# A body longer than this takes a while even to count, so it is counted in a thread.
LONG_TO_COUNT: Final = 2**20
# Seconds after which a thread gives up the GIL to another that waits (Python's default is 5 ms).
# The event loop waits for it several times a call.
SWITCH_S: Final = 0.0005
USUAL_SWITCH_S: Final = sys.getswitchinterval()


class Intake:
    """Read bodies within one worker's memory budget; run work that takes long in a thread.

    There is only one thread, so that two long bodies are never parsed at the same time: Python's
    parsers hold the GIL, and the event loop gets its turn between two bodies.
    """

    def __init__(self, *, budget: int, max_body: int, max_feedback: int) -> None:
        """Start with an empty budget; all three limits are in bytes."""
        self.budget = Budget(budget)
        self.max_body = max_body
        self.max_feedback = max_feedback
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="pawl-intake")

    def read_arrived(self, exchange: Exchange, claim: BudgetShare) -> tuple[bytes, bool] | None:
        """Return the result of `read` at once if a short body has arrived, None for any other.

        Nearly all bodies arrive with their heads, so that these calls await nothing here.

        Raises:
            TooLarge, BadRequest, Overloaded: as `read` does.
        """
        body = exchange.arrived_body(min(self.max_body, LONG_TO_COUNT))
        return None if body is None else _claim_to_parse(body, check_shape(body), claim)

    async def read(self, exchange: Exchange, claim: BudgetShare) -> tuple[bytes, bool]:
        """Return a call's body and whether parsing it takes long; claim the memory in `claim`.

        Raises:
            TooLarge: the body is larger than `max_body`, or holds too many values.
            BadRequest: the body nests too deep.
            Overloaded: there is no room for it now.
            ClientGone: the client left before it had sent the body.
        """
        body = await self.read_bytes(exchange, claim, self.max_body, "PAWL_MAX_BODY_MB")
        if len(body) > LONG_TO_COUNT:
            size: Size = await self.run_in_thread(check_shape, body)
        else:
            size = check_shape(body)
        return _claim_to_parse(body, size, claim)

    async def read_bytes(
        self, exchange: Exchange, claim: BudgetShare, limit: int, setting: str
    ) -> bytes:
        """Return a body of at most `limit` bytes (set by `setting`); its content is not checked.

        Raises:
            TooLarge: the body is larger than `limit`.
            Overloaded: there is no room for it now.
            ClientGone: the client left before it had sent the body.
        """
        try:
            length = exchange.length
            body = None
            if length is None or length <= limit:
                if length is not None:
                    claim.claim_at_least(COPIES * length)
                body = await exchange.read(
                    limit, lambda so_far: claim.claim_at_least(COPIES * so_far)
                )
            if body is None:
                raise TooLarge(
                    f"The request's body is larger than the {limit} bytes that this proxy takes. "
                    f"Send less, or raise {setting}"
                )
        except ProxyError:
            # The rest of the body is not read, so no request can follow on this connection.
            exchange.keep_alive = False
            raise
        return body

    async def run_in_thread(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Run slow work in the thread, and return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, _run_yielding_gil, work, arguments)

    def close(self) -> None:
        """Cancel the work that waits for the thread; do not wait for running work."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _claim_to_parse(body: bytes, size: Size, claim: BudgetShare) -> tuple[bytes, bool]:
    """Claim memory to parse a body; return the body and whether parsing takes long."""
    claim.claim_at_least(memory_cost_of(body, size))
    return body, takes_long(body, size)


def _run_yielding_gil(work: Callable[..., Result], arguments: tuple[object, ...]) -> Result:
    """Run `work` in this thread, which meanwhile yields the GIL to the event loop sooner."""
    sys.setswitchinterval(SWITCH_S)
    try:
        return work(*arguments)
    finally:
        sys.setswitchinterval(USUAL_SWITCH_S)
