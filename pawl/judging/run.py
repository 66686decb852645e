"""Shows finished episodes to a judge, a few at a time, and has its answers posted.

An episode is asked about again only if its judgement failed, a bounded number of times and
ever later. What happened is in the ledger before the next is asked about, so that a restart
goes on where it was; a crash between an answer's post and that repeats a post under the same
idempotency key, which states nothing new.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.export import Selection, encoded_line
from pawl.judging.answers import Judge, Statement, idempotency_key
from pawl.judging.desk import FeedbackDesk
from pawl.judging.errors import Away, JudgeError, JudgeFailed
from store.away import is_away
from store.errors import Damaged
from store.judgements import Awaiting, Judgement, Outcome, awaiting, holding, is_scored, note
from store.reading import read_episodes
from store.records import Episode, Record

log = structlog.get_logger()

POLL_S: Final = 5.0
# Looking for what is to be judged takes at most one part in so many of the database's time.
LOOK_SHARE: Final = 20
LONGEST_PAUSE_S: Final = 60.0
FIRST_RETRY: Final = timedelta(seconds=30)
RETRY_FACTOR: Final = 4.0
# So many episodes are looked for at once, times how many are judged at once.
AHEAD: Final = 8
MAX_REASON: Final = 1000


class JudgingPlan(Record, frozen=True, kw_only=True):
    """Which episodes are judged, and how hard it is tried.

    `quiet`: an episode is over when its last call is so long ago. `attempts`: how often a
    judgement may fail.
    """

    selection: Selection = Selection()
    quiet: timedelta = timedelta(minutes=10)
    concurrency: int = 4
    attempts: int = 5
    poll_s: float = POLL_S


def retry_at(failures: int, attempts: int, now: datetime) -> datetime | None:
    """When a judgement that failed so often is tried again; None: never."""
    if failures >= attempts:
        return None
    return now + FIRST_RETRY * RETRY_FACTOR ** (failures - 1)


class Judging:
    """One judge at work; `tally` counts what came of it."""

    def __init__(
        self, engine: AsyncEngine, judge: Judge, desk: FeedbackDesk, plan: JudgingPlan
    ) -> None:
        self.tally: Counter[str] = Counter()
        self._engine = engine
        self._judge = judge
        self._desk = desk
        self._plan = plan
        self._away: Away | None = None
        self._looked_s = 0.0
        # Answers that could not be posted yet: judging costs more than remembering.
        self._unsent: dict[tuple[UUID, datetime], list[Statement]] = {}

    async def run(self, *, once: bool = False) -> Mapping[str, int]:
        """Judge what is finished, for ever; or `once` all that can be judged now.

        Raises:
            JudgeError: another process runs this judge.
            Away: with `once`: a server does not answer.
        """
        async with holding(self._engine, self._judge.name) as held:
            if not held:
                raise JudgeError(
                    f"judge {self._judge.name!r} is at work already: stop it, or give this "
                    "one another --name"
                )
            log.info("judge_up", judge=self._judge.name)
            pause_s = 0.0
            while True:
                found = await self._round(once=once)
                if self._away is not None:
                    if once:
                        raise self._away
                    pause_s = min(LONGEST_PAUSE_S, max(self._plan.poll_s, 2 * pause_s))
                    log.warning("judge_waits", reason=str(self._away), seconds=pause_s)
                elif found:
                    pause_s = 0.0
                elif once:
                    return self.tally
                else:
                    pause_s = max(self._plan.poll_s, LOOK_SHARE * self._looked_s)
                await asyncio.sleep(pause_s)

    async def _round(self, *, once: bool) -> int:
        """Ask about some episodes; how many there were."""
        self._away = None
        try:
            found = await self._awaiting()
            some = asyncio.Semaphore(self._plan.concurrency)
            async with asyncio.TaskGroup() as group:
                for one in found:
                    group.create_task(self._one(one, some))
        except Exception as error:
            reasons = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
            if not all(map(is_away, reasons)):
                raise
            self._away = Away(f"PostgreSQL is away: {reasons[0]}")
            return 0
        return len(found)

    async def _awaiting(self) -> list[Awaiting]:
        now = datetime.now(UTC)
        begun = time.monotonic()
        async with self._engine.connect() as connection:
            found = await awaiting(
                connection,
                self._judge.name,
                now=now,
                quiet_since=now - self._plan.quiet,
                limit=AHEAD * self._plan.concurrency,
                since=self._plan.selection.since,
                agent=self._plan.selection.agent,
                policy=self._plan.selection.policy,
            )
        self._looked_s = time.monotonic() - begun
        return found

    async def _one(self, one: Awaiting, some: asyncio.Semaphore) -> None:
        """Judge one episode and keep what came of it."""
        async with some:
            if self._away is not None:
                return
            begun = time.monotonic()
            seen = datetime.now(UTC)
            episode: Episode | None = None
            outcome: Outcome = "failed"
            reason = None
            attempts = self._plan.attempts
            try:
                async with self._engine.connect() as connection:
                    [episode] = await read_episodes(connection, [one.episode_id])
                outcome = await self._judged(episode)
            except Away as error:
                self._away = error
                return
            except (JudgeFailed, Damaged) as error:
                reason = str(error).replace("\x00", "")[:MAX_REASON]
                if isinstance(error, Damaged):
                    # It will read no better another time: only a further call makes it news.
                    attempts = 1
            last_call_at = episode.last_call_at if episode else seen
            await self._note(one, outcome, reason, last_call_at, attempts)
            self.tally[outcome] += 1
            (log.warning if reason else log.info)(
                "episode_judged",
                episode=episode.key if episode else str(one.episode_id),
                outcome=outcome,
                reason=reason,
                attempts=one.failures + 1,
                took_s=round(time.monotonic() - begun, 3),
            )

    async def _judged(self, episode: Episode) -> Outcome:
        shown = (episode.id, episode.last_call_at)
        statements = self._unsent.pop(shown, None)
        if statements is None:
            line = encoded_line(episode, datetime.now(UTC), self._plan.quiet)
            statements = await self._judge.judge(episode.key, line)
        if not statements:
            return "cannot_tell"
        async with self._engine.connect() as connection:
            if await is_scored(connection, episode.id):
                # Somebody who knows better was quicker: the newest statement would stand.
                return "judged"
        try:
            await self._desk.post(statements, idempotency_key(self._judge.name, episode.key))
        except Away:
            self._unsent[shown] = statements
            raise
        return "judged"

    async def _note(
        self,
        one: Awaiting,
        outcome: Outcome,
        reason: str | None,
        last_call_at: datetime,
        most_attempts: int,
    ) -> None:
        failures = one.failures + 1
        due_at = None
        if outcome == "failed":
            due_at = retry_at(failures, most_attempts, datetime.now(UTC))
        judgement = Judgement(
            episode_id=one.episode_id,
            judge=self._judge.name,
            outcome=outcome,
            attempts=failures,
            last_call_at=last_call_at,
            reason=reason,
            due_at=due_at,
        )
        async with self._engine.begin() as connection:
            await note(connection, judgement)
