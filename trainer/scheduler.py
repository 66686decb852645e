"""Give the policies of one trainer their turns, one update at a time.

A failure of one policy does not stop the others: the trainer leaves that policy, and takes it up
again later. If the database or all model servers are away, the error is raised to the caller.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic, perf_counter
from typing import Final, TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store import claims
from store.database import is_unavailable
from store.errors import ClaimLost
from store.records import Record
from trainer.errors import FilesUnread, UpstreamAway
from trainer.loop import Loop
from trainer.metrics import LEFT_POLICY, begin_policy

log = structlog.get_logger()

T = TypeVar("T")
# Seconds before a policy that another trainer holds, or took over, is tried again.
RETRY_S: Final = 1.0
# Seconds of pause after a policy's first failure; each further failure doubles the pause.
FIRST_PAUSE_S: Final = 30.0
LONGEST_PAUSE_S: Final = 3600.0
# Seconds between checks whether the controller has published a version.
PUBLISHED_POLL_S: Final = 0.1
# The pause after a check of the store is at least this many times as long as the check, so
# that a large backlog does not keep the database busy.
PAUSE_PER_CHECK: Final = 10
# A policy waits for at most this many turns, times the number of waiting policies.
PATIENCE: Final = 4


class PolicyWorker:
    """Hold one policy of a trainer, run its turns, and try again after its failures.

    Attributes:
        policy: the policy's name.
        turns: turns of other policies since its own last turn.
        failure: the error for which the policy was left; None once it is taken up again.
    """

    def __init__(self, policy: str, begin: Callable[[AsyncEngine], Awaitable[Loop]]) -> None:
        """Store `begin`, which makes the policy's loop once the policy is held."""
        self.policy = policy
        self.turns = 0
        self.failure: Exception | None = None
        self._begin = begin
        self._loop: Loop | None = None
        self._not_before = 0.0
        self._failures = 0
        self._waiting_was_logged = False
        begin_policy(policy)

    def forget_hold(self) -> None:
        """Note that the policy is no longer held, because the connection that held it is closed."""
        self._loop = None

    async def try_to_hold(self, guard: AsyncConnection, engine: AsyncEngine) -> bool:
        """Hold the policy for as long as `guard` lives; return whether it can be worked on now.

        It cannot while another trainer holds it, and for a while after a failure. If the policy is
        held already, run a test of the model servers that is due.
        """
        if self._loop is not None:
            await self._call_loop(guard, lambda loop: loop.test_if_due())
            return self._loop is not None
        if monotonic() < self._not_before:
            return False
        if not await claims.hold_policy(guard, self.policy):
            self._wait_to_retry(f"another trainer works on policy {self.policy}")
            return False
        self._waiting_was_logged = False
        self._loop = await self._guarded(guard, lambda: self._begin(engine))
        return self._loop is not None

    async def waiting_updates(self, guard: AsyncConnection, *, alone: bool) -> float | None:
        """Check the model servers; return how many updates wait, or None after a failure.

        A policy that is `alone` returns 0, since no other competes for the turn.
        """

        async def work(loop: Loop) -> float:
            await loop.watch_servers()
            return 0.0 if alone else await loop.waiting_updates()

        return await self._call_loop(guard, work)

    async def update_once(self, guard: AsyncConnection, *, looks_ahead: bool) -> bool:
        """Run one update if enough episodes are ready; return whether there was one.

        With `looks_ahead` the policy's next update may be begun already (`Loop.update_once`).
        """
        done = await self._call_loop(guard, lambda loop: loop.update_once(looks_ahead=looks_ahead))
        if done:
            self._failures = 0
        return bool(done)

    @property
    def awaits_controller(self) -> bool:
        """Return whether the newest version was still unpublished at the last check."""
        return self._loop is not None and self._loop.awaits_controller

    async def is_published(self, guard: AsyncConnection) -> bool:
        """Return whether the controller has published the policy's newest version, or it failed."""
        return await self._call_loop(guard, lambda loop: loop.is_published()) is not False

    async def stop(self) -> None:
        """End the policy's running update (`Loop.stop`)."""
        if self._loop is not None:
            await self._loop.stop()

    async def _call_loop(
        self, guard: AsyncConnection, work: Callable[[Loop], Awaitable[T]]
    ) -> T | None:
        loop = self._loop
        if loop is None:
            return None
        return await self._guarded(guard, lambda: work(loop))

    async def _guarded(self, guard: AsyncConnection, work: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of `work`; if it fails, leave the policy and return None.

        Errors of a database or model server that is away are passed on.
        """
        with structlog.contextvars.bound_contextvars(policy=self.policy):
            try:
                done = await work()
            except Exception as error:
                if is_unavailable(error) or isinstance(error, UpstreamAway):
                    raise
                await self._release_policy(guard, error)
                return None
        self._show_failure(None)
        return done

    def _show_failure(self, why: Exception | None) -> None:
        self.failure = why
        LEFT_POLICY.labels(self.policy).set(why is not None)

    async def _release_policy(self, guard: AsyncConnection, why: Exception) -> None:
        self._loop = None
        await claims.release_policy(guard, self.policy)
        reason = f"{type(why).__name__}: {why}"
        if isinstance(why, ClaimLost):
            self._wait_to_retry(reason)
            return
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**self._failures)
        self._failures += 1
        self._not_before = monotonic() + pause
        self._show_failure(why)
        log.error("policy_left", policy=self.policy, reason=reason, again_in_s=pause)

    def _wait_to_retry(self, why: str) -> None:
        self._not_before = monotonic() + RETRY_S
        if not self._waiting_was_logged:
            log.warning("trainer_waits", policy=self.policy, reason=why[:200])
        self._waiting_was_logged = True


class PolicyScheduler:
    """Run updates of policies that share a trainer, for as long as one database connection lives.

    `guard` is the connection that holds the policies.
    """

    def __init__(
        self,
        workers: Sequence[PolicyWorker],
        guard: AsyncConnection,
        engine: AsyncEngine,
        is_ready: asyncio.Event,
    ) -> None:
        """Begin with no policy held; `is_ready` is set once all were tried and not all failed."""
        self._workers = {worker.policy: worker for worker in workers}
        self._guard = guard
        self._engine = engine
        self._is_ready = is_ready
        for worker in workers:
            worker.forget_hold()

    async def run(self, poll_s: float, *, once: bool) -> None:
        """Run one update after the other; with `once`, return once the first one's is published.

        Raises:
            Exception: the last policy's failure, if all policies failed, and none of them only
                because its files cannot be read for now.
        """
        try:
            while True:
                await claims.check_connected(self._guard)
                held = await self._hold_workable()
                self._check_failures()
                self._is_ready.set()
                # Timed from here: taking up a policy takes long, and is no check of the store.
                started = perf_counter()
                updated = await self._run_turn(held, once=once)
                if updated is not None and once:
                    # Another process publishes, so there is no event to wait for.
                    while not await updated.is_published(self._guard):  # noqa: ASYNC110
                        await asyncio.sleep(PUBLISHED_POLL_S)
                    return
                if updated is None:
                    check_s = perf_counter() - started
                    awaits = any(worker.awaits_controller for worker in held)
                    pause_s = min(poll_s, PUBLISHED_POLL_S) if awaits else poll_s
                    await asyncio.sleep(max(pause_s, PAUSE_PER_CHECK * check_s))
        except asyncio.CancelledError:
            for worker in self._workers.values():
                await worker.stop()
            raise

    async def _hold_workable(self) -> list[PolicyWorker]:
        """Hold the policies that can be worked on, and return them."""
        workers = self._workers.values()
        return [worker for worker in workers if await worker.try_to_hold(self._guard, self._engine)]

    def _check_failures(self) -> None:
        """Check that some policy can be worked on, now or later.

        Raises:
            Exception: see `run`.
        """
        failures = [worker.failure for worker in self._workers.values()]
        last = failures[-1]
        may_pass = any(why is None or isinstance(why, FilesUnread) for why in failures)
        if last is not None and not may_pass:
            raise last

    async def _run_turn(
        self, held: Sequence[PolicyWorker], *, once: bool = False
    ) -> PolicyWorker | None:
        """Run an update of the first policy in turn with enough episodes; return its worker.

        Return None if no update ran.

        Raises:
            Exception: see `run`.
        """
        waiting, alone = [], len(self._workers) == 1
        for worker in held:
            signal = await worker.waiting_updates(self._guard, alone=alone)
            if signal is not None:
                waiting.append(
                    WaitingSignal(policy=worker.policy, updates=signal, turns=worker.turns)
                )
        for name in turn_order(waiting):
            # With several policies the next update may be another policy's.
            looks_ahead = alone and not once
            if await self._workers[name].update_once(self._guard, looks_ahead=looks_ahead):
                for worker in self._workers.values():
                    worker.turns = 0 if worker.policy == name else worker.turns + 1
                return self._workers[name]
        self._check_failures()
        return None


class WaitingSignal(Record, frozen=True, kw_only=True):
    """The signal that waits for one policy.

    `updates` is the number of updates that the signal makes by the policy's recipe, so that
    policies with small updates are not at a disadvantage. `turns` counts other policies' turns
    since the policy's own last turn.
    """

    policy: str
    updates: float
    turns: int


def turn_order(waiting: Sequence[WaitingSignal]) -> list[str]:
    """Return the policies in the order in which they may have the next turn (pure).

    Most signal first; among equals, the policy that has waited for more turns. Policies that waited
    for `PATIENCE` turns per policy come before all others, the longest wait first, even with little
    signal: it may suffice by now. A policy that makes no update passes its turn on.
    """
    patience = PATIENCE * len(waiting)

    def rank(policy: WaitingSignal) -> tuple[bool, float, int]:
        is_overdue = policy.turns >= patience
        return not is_overdue, 0.0 if is_overdue else -policy.updates, -policy.turns

    return [policy.policy for policy in sorted(waiting, key=rank)]
