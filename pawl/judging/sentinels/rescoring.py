"""Have a judge score its sentinels again, as it scores episodes, and keep what it said.

Nothing is posted: what is said of a sentinel is no feedback, and reaches no reward. Each answer is
written at once, so that a round that was broken off goes on where it stopped. A server that is away
says nothing about the judge, and the round waits for it; a judge that fails does, and is not asked
again in the round. So is one sentinel that is refused each time while another is answered: the
server is there, and the round would never end.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Final, Literal, TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.judging.answers import Judge
from pawl.judging.errors import MAX_REASON, Away, JudgeError, JudgeFailed, reason_of
from pawl.judging.sentinels.ending import end
from pawl.judging.sentinels.shown import digest_of_line, score_of, sentinel_line
from store.connection.availability import is_unavailable
from store.errors import Damaged
from store.judge.judgements import holding
from store.judge.rounds import Round, begin_round, due_in
from store.judge.sentinels import Rescored, Sentinel, another, note_score, waiting
from store.read.episodes import read_episodes
from store.records import Record
from store.tenants import DEFAULT, bare, scoped

log = structlog.get_logger()

Result = TypeVar("Result")
# `begun`: its next turn is due; `not ours`: another process is at it, or it is not due any more.
NotEnded = Literal["begun", "not ours"]

# A turn is at most this many sentinels for each one that is judged at the same time: a running
# judge scores so many, then episodes, and so on.
TURN: Final = 4
# Between looks for sentinels, where a judge has none.
LOOK_S: Final = 60.0
FIRST_PAUSE_S: Final = 5.0
LONGEST_PAUSE_S: Final = 60.0
CHANGED: Final = "the episode has changed since it became a sentinel: the judge would see more"


class SentinelPlan(Record, frozen=True, kw_only=True):
    """Set the rules by which sentinels are scored.

    Attributes:
        tenant: whose judge it is.
        concurrency: how many sentinels are judged at the same time.
        every_s: seconds from the end of a round to the beginning of the next; 0: there is none.
        evidence: of how much evidence on a judge counts as drifted.
        again_s: seconds before each further try with a sentinel that was refused.
    """

    tenant: str = DEFAULT
    concurrency: int = 4
    every_s: float = 3600.0
    evidence: float = 10_000.0
    again_s: tuple[float, ...] = (1.0, 4.0)


class Rescoring:
    """Score a judge's sentinels, whenever that is due or at once."""

    def __init__(self, engine: AsyncEngine, judge: Judge, plan: SentinelPlan) -> None:
        """Store the judge and the rules."""
        self._engine = engine
        self._judge = judge
        self._plan = plan
        self._kept = scoped(plan.tenant, judge.name)
        self._look_at = 0.0
        self._pause_s = FIRST_PAUSE_S

    async def when_due(self) -> bool:
        """Score a turn of sentinels if that is due; if a server is away, a later call goes on.

        Returns:
            Whether the round has more of them: the next turn may follow at once.
        """
        if self._plan.every_s == 0 or time.monotonic() < self._look_at:
            return False
        try:
            pause_s = await self._look()
            self._pause_s = FIRST_PAUSE_S
        except Away as error:
            pause_s = self._pause_s
            self._pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            log.warning("sentinels_wait", reason=str(error), seconds=pause_s)
        self._look_at = time.monotonic() + pause_s
        return pause_s == 0

    async def _look(self) -> float:
        """Score a turn of sentinels if that is due, and return the seconds until the next look."""
        if (due_s := await _reached(self._due_in())) is None:
            return LOOK_S
        if due_s == 0:
            if await self._round(in_turns=True) == "begun":
                return 0.0
            due_s = await _reached(self._due_in())
        # Where a round is still due, another process is at it.
        return LOOK_S if due_s is None else min(due_s, LOOK_S) or FIRST_PAUSE_S

    async def now(self) -> Round:
        """Score the sentinels at once, and return what that came to.

        Raises:
            JudgeError: the judge has no sentinels, or another process scores them now.
            Away: a server does not answer; the round goes on with the next call.
        """
        if await _reached(self._due_in()) is None:
            raise JudgeError(
                f"judge {self._judge.name!r} has no sentinels: add some with `pawl sentinels add`; "
                "`pawl sentinels list` shows which judges have any"
            )
        ended = await self._round(in_turns=False)
        if not isinstance(ended, Round):
            raise JudgeError(
                f"the sentinels of judge {self._judge.name!r} are being scored by another process: "
                "wait for it, then look at them with `pawl sentinels show`"
            )
        return ended

    async def _due_in(self) -> float | None:
        async with self._engine.connect() as connection:
            return await due_in(connection, self._kept, self._plan.every_s)

    async def _round(self, *, in_turns: bool) -> Round | NotEnded:
        """Score a round to its end, or `in_turns` as many sentinels of a due one as are a turn."""
        return await _reached(self._hold_round(in_turns))

    async def _hold_round(self, in_turns: bool) -> Round | NotEnded:
        async with holding(self._engine, self._kept, "sentinels") as held:
            if not held or (in_turns and await self._due_in() != 0):
                return "not ours"
            async with self._engine.begin() as connection:
                number = await begin_round(connection, self._kept)
            asked = False
            most = TURN * self._plan.concurrency if in_turns else None
            while left := await self._waiting(number, most):
                if in_turns and asked:
                    return "begun"
                await self._ask(left, number)
                asked = True
            return await end(self._engine, self._kept, number, self._plan.evidence)

    async def _waiting(self, number: int, most: int | None) -> list[Sentinel]:
        async with self._engine.connect() as connection:
            return await waiting(connection, self._kept, number, most)

    async def _ask(self, left: Sequence[Sentinel], number: int) -> None:
        """Ask about sentinels, several at a time; once one is refused, no further one is begun.

        Raises:
            Away: the judge's server does not answer. What was under way then is written.
        """
        limit = asyncio.Semaphore(self._plan.concurrency)
        refused: list[tuple[Sentinel, Away]] = []

        async def ask(one: Sentinel) -> None:
            async with limit:
                if refused:
                    return
                try:
                    await self._one(one, number)
                except Away as error:
                    refused.append((one, error))

        async with asyncio.TaskGroup() as group:
            for one in left:
                group.create_task(ask(one))
        for one, error in refused:
            await self._ask_refused(one, error, number)

    async def _ask_refused(self, refused: Sentinel, error: Away, number: int) -> None:
        """Ask about one again that was refused, whenever another was answered; else it has failed.

        Raises:
            Away: the other is refused, too, or there is none.
        """
        for pause_s in self._plan.again_s:
            await asyncio.sleep(pause_s)
            if not await self._answers_another(refused, number):
                raise error
            try:
                await self._one(refused, number)
                return
            except Away as again:
                error = again
        reason = f"refused each time, while another sentinel was answered: {reason_of(error)}"
        await self._note(refused, number, Rescored(outcome="failed", reason=reason[:MAX_REASON]))

    async def _answers_another(self, refused: Sentinel, number: int) -> bool:
        """Return whether the judge answers about another sentinel; of one scored, nothing is new.

        Raises:
            Away: it does not.
        """
        async with self._engine.connect() as connection:
            other = await another(connection, self._kept, number, refused.episode_id)
        if other is None:
            return False
        return (await self._one(other, number)).outcome in ("scored", "cannot_tell")

    async def _one(self, sentinel: Sentinel, number: int) -> Rescored:
        """Ask about one sentinel, and write what came of it.

        Raises:
            Away: the judge's server does not answer.
        """
        rescored = await self._asked(sentinel)
        await self._note(sentinel, number, rescored)
        return rescored

    async def _note(self, sentinel: Sentinel, number: int, rescored: Rescored) -> None:
        async with self._engine.begin() as connection:
            await note_score(connection, self._kept, number, sentinel.episode_id, rescored)

    async def _asked(self, sentinel: Sentinel) -> Rescored:
        try:
            async with self._engine.connect() as connection:
                episodes = await read_episodes(connection, [sentinel.episode_id])
            # One that was deleted meanwhile is a sentinel no more, and nothing of it is written.
            line = sentinel_line(episodes[0]) if episodes else b""
            if digest_of_line(line) != sentinel.digest:
                return Rescored(outcome="changed", reason=CHANGED)
            statements = await self._judge.judge(bare(episodes[0].key), line)
            score = score_of(statements, sentinel.metric)
        except Damaged as error:
            return Rescored(outcome="changed", reason=reason_of(error))
        except JudgeFailed as error:
            return Rescored(outcome="failed", reason=reason_of(error))
        if score is None:
            return Rescored(outcome="cannot_tell")
        return Rescored(outcome="scored", score=score)


async def _reached(work: Awaitable[Result]) -> Result:
    """Return the work's result.

    Raises:
        Away: the database, or the judge's server, does not answer.
    """
    try:
        return await work
    except Exception as error:
        reasons = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        away = next((one for one in reasons if isinstance(one, Away)), None)
        if away is not None and all(
            isinstance(one, Away) or is_unavailable(one) for one in reasons
        ):
            raise away from error
        if all(map(is_unavailable, reasons)):
            raise Away(f"PostgreSQL does not answer: {reasons[0]}") from error
        raise
