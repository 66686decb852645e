"""Takes bodies in: no more of them than there is room for, none that costs too much to read."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from proxy.errors import ProxyError, TooLarge
from proxy.http.exchange import Exchange
from proxy.intake.budget import Budget, Claim
from proxy.intake.shape import COPIES, check_shape, cost_of, takes_long
from store.json_limits import Size

Found = TypeVar("Found")
# Even to count what is in a body of this size takes a while.
LONG_TO_COUNT: Final = 2**20


class Intake:
    """A worker's: one budget, and one thread for what would hold up the event loop.

    One thread, so that two long bodies are never parsed at once: what Python's parsers do they
    do without letting other threads run, and between two of them everybody else has a turn.
    """

    def __init__(self, *, budget: int, max_body: int, max_feedback: int) -> None:
        self.budget = Budget(budget)
        self.max_body = max_body
        self.max_feedback = max_feedback
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="pawl-intake")

    async def read(self, exchange: Exchange, claim: Claim) -> tuple[bytes, bool]:
        """The body of a call, and whether reading it takes long; it holds room in `claim`.

        Raises:
            TooLarge: it is larger than the proxy takes, or holds too many values.
            BadRequest: it nests too deep.
            Overloaded: there is no room for it now.
            ClientGone: the client left before it was sent.
        """
        body = await self.read_bytes(exchange, claim, self.max_body, "PAWL_MAX_BODY_MB")
        if len(body) > LONG_TO_COUNT:
            size: Size = await self.beside(check_shape, body)
        else:
            size = check_shape(body)
        claim.ask(cost_of(body, size))
        return body, takes_long(body, size)

    async def read_bytes(self, exchange: Exchange, claim: Claim, limit: int, setting: str) -> bytes:
        """A body of at most `limit` bytes, which `setting` sets, whatever it holds; see `read`."""
        try:
            return await self._read_bytes(exchange, claim, limit, setting)
        except ProxyError:
            # The rest of it is not read: nothing can follow on this connection.
            exchange.keep_alive = False
            raise

    async def _read_bytes(
        self, exchange: Exchange, claim: Claim, limit: int, setting: str
    ) -> bytes:
        length = exchange.length
        body = None
        if length is None or length <= limit:
            if length is not None:
                claim.ask(COPIES * length)
            body = await exchange.read(limit, lambda so_far: claim.ask(COPIES * so_far))
        if body is None:
            raise TooLarge(
                f"The request's body is larger than the {limit} bytes that this proxy takes; "
                f"{setting} sets how much"
            )
        return body

    async def beside(self, work: Callable[..., Found], *arguments: object) -> Found:
        """The outcome of work that takes long: the event loop goes on meanwhile."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._beside, work, *arguments)

    def close(self) -> None:
        """Begin nothing more."""
        self._beside.shutdown(wait=False, cancel_futures=True)
