"""Read request bodies within their limits: memory, size, and the cost of parsing them."""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from proxy.errors import ProxyError, TooLarge
from proxy.http.exchange import Exchange
from proxy.intake.limits import COPIES, Budget, Claim, check_shape, cost_of, takes_long
from store.values.json_limits import Size

Result = TypeVar("Result")
# A body longer than this takes a while even to count, so it is counted beside the event loop.
LONG_TO_COUNT: Final = 2**20
# Seconds after which a thread gives up the GIL to another that waits (Python's default is 5 ms).
# The event loop waits for it several times a call.
SWITCH_S: Final = 0.0005
USUAL_S: Final = sys.getswitchinterval()


class Intake:
    """Let bodies into one worker: a memory budget, and a thread for work that blocks the loop.

    There is only one thread, so that two long bodies are never parsed at the same time: Python's
    parsers hold the GIL, and the event loop gets its turn between two bodies.
    """

    def __init__(self, *, budget: int, max_body: int, max_feedback: int) -> None:
        """Start with an empty budget; all three limits are in bytes."""
        self.budget = Budget(budget)
        self.max_body = max_body
        self.max_feedback = max_feedback
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="pawl-intake")

    def read_arrived(self, exchange: Exchange, claim: Claim) -> tuple[bytes, bool] | None:
        """Return what `read` does, at once, if the body has come and is not long; else None.

        Nearly all bodies come with their heads, and their calls need not wait for anything here.

        Raises:
            TooLarge, BadRequest, Overloaded: as `read` does.
        """
        body = exchange.arrived(min(self.max_body, LONG_TO_COUNT))
        return None if body is None else _admitted(body, check_shape(body), claim)

    async def read(self, exchange: Exchange, claim: Claim) -> tuple[bytes, bool]:
        """Return a call's body, and whether parsing it takes long; its memory is in `claim`.

        Raises:
            TooLarge: the body is larger than `max_body`, or holds too many values.
            BadRequest: the body nests too deep.
            Overloaded: there is no room for it now.
            ClientGone: the client left before it had sent the body.
        """
        body = await self.read_bytes(exchange, claim, self.max_body, "PAWL_MAX_BODY_MB")
        if len(body) > LONG_TO_COUNT:
            size: Size = await self.beside(check_shape, body)
        else:
            size = check_shape(body)
        return _admitted(body, size, claim)

    async def read_bytes(self, exchange: Exchange, claim: Claim, limit: int, setting: str) -> bytes:
        """Return a body of at most `limit` bytes, whose content is not checked.

        Args:
            exchange: the request.
            claim: charged with the body's memory.
            limit: in bytes.
            setting: the `PAWL_*` variable that sets the limit, for the error message.

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
                    claim.ask(COPIES * length)
                body = await exchange.read(limit, lambda so_far: claim.ask(COPIES * so_far))
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

    async def beside(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Run work that takes long in the thread, and return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._beside, _yielding, work, arguments)

    def close(self) -> None:
        """Cancel waiting work; what runs is not waited for."""
        self._beside.shutdown(wait=False, cancel_futures=True)


def _admitted(body: bytes, size: Size, claim: Claim) -> tuple[bytes, bool]:
    """Return a body whose parsing there is room for, and whether that takes long."""
    claim.ask(cost_of(body, size))
    return body, takes_long(body, size)


def _yielding(work: Callable[..., Result], arguments: tuple[object, ...]) -> Result:
    """Do the work in this thread, and meanwhile let the event loop have the GIL sooner."""
    sys.setswitchinterval(SWITCH_S)
    try:
        return work(*arguments)
    finally:
        sys.setswitchinterval(USUAL_S)
