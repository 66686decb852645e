"""Work on one of the policies that a trainer trains: hold it, run its turns, outlive its failures.

What fails in one policy does not stop the others: the policy is left, and taken up again later. A
database or a model server that is away is away for all, and is the caller's.
"""

from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final, TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.connection.availability import is_unavailable
from store.errors import ClaimLost
from store.updates import claims
from trainer.errors import UpstreamAway
from trainer.loop import Loop
from trainer.metrics import LEFT

log = structlog.get_logger()

T = TypeVar("T")
# Seconds until a policy that another trainer holds, or took, is tried again.
RETRY_S: Final = 1.0
# After a failure: the first pause, twice as long each time.
FIRST_PAUSE_S: Final = 30.0
LONGEST_PAUSE_S: Final = 3600.0


class Trainee:
    """Work on one policy of a trainer.

    Attributes:
        policy: its name.
        turns: how many turns others had since its own last.
        failure: why it was left, until it is taken up again.
    """

    def __init__(self, policy: str, begin: Callable[[AsyncEngine], Awaitable[Loop]]) -> None:
        """Store how the policy's loop begins, once the policy is held."""
        self.policy = policy
        self.turns = 0
        self.failure: Exception | None = None
        self._begin = begin
        self._loop: Loop | None = None
        self._not_before = 0.0
        self._failures = 0
        self._waiting_was_logged = False

    def lost(self) -> None:
        """Forget the hold on the policy, which ended with its connection."""
        self._loop = None

    async def take_up(self, guard: AsyncConnection, engine: AsyncEngine) -> bool:
        """Hold the policy for as long as `guard` lives; return whether it can be worked on now.

        It cannot while another trainer holds it, and for a while after a failure.
        """
        if self._loop is not None:
            await self._of_loop(guard, lambda loop: loop.try_again())
            return self._loop is not None
        if monotonic() < self._not_before:
            return False
        if not await claims.hold_policy(guard, self.policy):
            self._wait(f"another trainer works on policy {self.policy}")
            return False
        self._waiting_was_logged = False
        self._loop = await self._guarded(guard, lambda: self._begin(engine))
        return self._loop is not None

    async def waiting(self, guard: AsyncConnection, *, alone: bool) -> float | None:
        """Bring the model servers up to date; return how much signal waits, None after a failure.

        The signal is counted in updates, unless the policy is alone: then nobody needs to know.
        """

        async def work(loop: Loop) -> float:
            await loop.sync_adapters()
            return 0.0 if alone else await loop.waiting_updates()

        return await self._of_loop(guard, work)

    async def update_once(self, guard: AsyncConnection) -> bool:
        """Run one update if enough episodes are ready; return whether there was one."""
        done = await self._of_loop(guard, lambda loop: loop.update_once())
        if done:
            self._failures = 0
        return bool(done)

    async def _of_loop(
        self, guard: AsyncConnection, work: Callable[[Loop], Awaitable[T]]
    ) -> T | None:
        loop = self._loop
        if loop is None:
            return None
        return await self._guarded(guard, lambda: work(loop))

    async def _guarded(self, guard: AsyncConnection, work: Callable[[], Awaitable[T]]) -> T | None:
        """Return what `work` does, or None if it failed; then the policy is left."""
        with structlog.contextvars.bound_contextvars(policy=self.policy):
            try:
                done = await work()
            except Exception as error:
                if is_unavailable(error) or isinstance(error, UpstreamAway):
                    raise
                await self._leave(guard, error)
                return None
        self._failed(None)
        return done

    def _failed(self, why: Exception | None) -> None:
        self.failure = why
        LEFT.labels(self.policy).set(why is not None)

    async def _leave(self, guard: AsyncConnection, why: Exception) -> None:
        self._loop = None
        await claims.leave_policy(guard, self.policy)
        if isinstance(why, ClaimLost):
            self._wait(f"{type(why).__name__}: {why}")
            return
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**self._failures)
        self._failures += 1
        self._not_before = monotonic() + pause
        self._failed(why)
        log.error(
            "policy_left",
            policy=self.policy,
            reason=f"{type(why).__name__}: {why}",
            again_in_s=pause,
        )

    def _wait(self, why: str) -> None:
        self._not_before = monotonic() + RETRY_S
        if not self._waiting_was_logged:
            log.warning("trainer_waits", policy=self.policy, reason=why[:200])
        self._waiting_was_logged = True
