"""Show finished episodes to a judge, several at a time, and post its answers.

A failed judgement is retried after growing pauses, a bounded number of times. Each outcome is
written to the ledger at once, so that a restart continues where the last process stopped. After a
crash between posting an answer and writing its outcome, the post is repeated with the same
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

from pawl.judging.answers import (
    Away,
    Judge,
    JudgeError,
    JudgeFailed,
    NotYet,
    Statement,
    idempotency_key,
)
from pawl.judging.feedback import FeedbackClient
from store.database import is_unavailable
from store.errors import Damaged
from store.judging import (
    AwaitingEpisode,
    Judgement,
    Outcome,
    episodes_awaiting_judge,
    hold_judge,
    store_judgement,
)
from store.read.episodes import read_episodes
from store.read.lines import encoded_line
from store.records import Episode, Record
from store.selecting import ALL, Selection
from store.tenants import DEFAULT, bare, scoped

log = structlog.get_logger()

POLL_S: Final = 5.0
# The pause after a look for episodes is at least this many times as long as the look, so that
# a large backlog does not keep the database busy.
LOOK_SHARE: Final = 20
LONGEST_PAUSE_S: Final = 60.0
FIRST_RETRY: Final = timedelta(seconds=30)
RETRY_FACTOR: Final = 4.0
# Pauses grow up to LONGEST_RETRY. The bounded exponent keeps the product within a timedelta.
LONGEST_RETRY: Final = timedelta(hours=6)
MAX_EXPONENT: Final = 10
# Tries after which an episode that the judge cannot tell yet stays unscored: nine days.
MOST_WAITS: Final = 40
MAX_REASON: Final = 1000
# A tool's status is posted as a fact, not as an opinion.
TOOL_STATUS: Final = "tool_status"
# Most episodes that a look returns, as a multiple of the plan's concurrency.
LOOK_AHEAD_FACTOR: Final = 8


class JudgingPlan(Record, frozen=True, kw_only=True):
    """Which episodes a judge gets, when, and how many at once.

    Attributes:
        selection: which episodes are judged.
        quiet: how long after its last call an episode counts as finished.
        concurrency: how many episodes are judged at the same time.
        attempts: the number of failures after which an episode is given up.
        compared: share of rewarded episodes that are judged, too, to measure the judge.
        poll_s: pause between looks for episodes, in seconds.
    """

    selection: Selection = ALL
    quiet: timedelta = timedelta(minutes=10)
    concurrency: int = 4
    attempts: int = 5
    compared: float = 0.0
    poll_s: float = POLL_S


def retry_at(times: int, attempts: int, now: datetime) -> datetime | None:
    """Return when to retry a judgement after `times` tries without a result; None: never."""
    if times >= attempts:
        return None
    return now + min(LONGEST_RETRY, FIRST_RETRY * RETRY_FACTOR ** min(times - 1, MAX_EXPONENT))


class Judging:
    """Runs a judge on finished episodes until stopped; `tally` counts episodes by outcome."""

    def __init__(
        self,
        engine: AsyncEngine,
        judge: Judge,
        feedback: FeedbackClient,
        plan: JudgingPlan,
    ) -> None:
        self.tally: Counter[str] = Counter()
        self._engine = engine
        self._judge = judge
        self._feedback = feedback
        self._plan = plan
        self._away: Away | None = None
        self._looked_s = 0.0
        # Answers that could not be posted yet. They are kept, as judging again would cost more.
        self._unsent: dict[tuple[UUID, datetime], list[Statement]] = {}

    async def run(self, *, once: bool = False) -> Mapping[str, int]:
        """Judge finished episodes for ever, or with `once` all that can be judged now.

        Returns:
            The number of episodes by outcome.

        Raises:
            JudgeError: another process runs a judge of the same name.
            Away: with `once`, a server does not answer.
        """
        tenant = self._plan.selection.tenant or DEFAULT
        async with hold_judge(self._engine, scoped(tenant, self._judge.name)) as held:
            if not held:
                raise JudgeError(
                    f"judge {self._judge.name!r} is at work already in another process: stop "
                    "that one, or give this one another --name"
                )
            log.info("judge_up", judge=self._judge.name)
            pause_s = 0.0
            while True:
                episodes = await self._judge_round()
                if self._away is not None:
                    if once:
                        raise self._away
                    pause_s = min(LONGEST_PAUSE_S, max(self._plan.poll_s, 2 * pause_s))
                    log.warning("judge_waits", reason=str(self._away), seconds=pause_s)
                elif episodes:
                    pause_s = 0.0
                elif once:
                    return self.tally
                else:
                    pause_s = max(self._plan.poll_s, LOOK_SHARE * self._looked_s)
                await asyncio.sleep(pause_s)

    async def _judge_round(self) -> int:
        """Judge the waiting episodes, and return how many there were."""
        self._away = None
        try:
            waiting = await self._awaiting()
            limit = asyncio.Semaphore(self._plan.concurrency)
            async with asyncio.TaskGroup() as group:
                for one in waiting:
                    group.create_task(self._judge_episode(one, limit))
        except Exception as error:
            reasons = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
            if not all(map(is_unavailable, reasons)):
                raise
            self._away = Away(f"PostgreSQL does not answer: {reasons[0]}")
            return 0
        return len(waiting)

    async def _awaiting(self) -> list[AwaitingEpisode]:
        now = datetime.now(UTC)
        begun = time.monotonic()
        async with self._engine.connect() as connection:
            waiting = await episodes_awaiting_judge(
                connection,
                self._judge.name,
                self._plan.selection,
                now=now,
                quiet_since=now - self._plan.quiet,
                compared=self._plan.compared,
                limit=LOOK_AHEAD_FACTOR * self._plan.concurrency,
            )
        self._looked_s = time.monotonic() - begun
        return waiting

    async def _judge_episode(self, one: AwaitingEpisode, limit: asyncio.Semaphore) -> None:
        """Judge an episode, and store and log the outcome."""
        async with limit:
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
                outcome = await self._judge_and_post(episode)
            except Away as error:
                self._away = error
                return
            except (JudgeFailed, NotYet, Damaged) as error:
                # PostgreSQL's texts cannot hold a zero byte.
                reason = str(error).replace("\x00", "")[:MAX_REASON]
                if isinstance(error, NotYet):
                    outcome, attempts = "cannot_tell", MOST_WAITS
                if isinstance(error, Damaged):
                    # A retry fails the same way until a further call changes the episode.
                    attempts = 1
            # Tries are counted by outcome: those that could not tell yet are no failures.
            times = 1 + (one.times if outcome == one.outcome else 0)
            is_failed = outcome == "failed"
            judgement = Judgement(
                episode_id=one.episode_id,
                judge=self._judge.name,
                outcome=outcome,
                attempts=times,
                last_call_at=episode.last_call_at if episode else seen,
                reason=reason,
                due_at=retry_at(times, attempts, datetime.now(UTC)) if reason else None,
            )
            async with self._engine.begin() as connection:
                await store_judgement(connection, judgement)
            self.tally[outcome] += 1
            (log.warning if is_failed else log.info)(
                "episode_judged",
                episode=bare(episode.key) if episode else str(one.episode_id),
                outcome=outcome,
                reason=reason,
                attempts=times,
                took_s=round(time.monotonic() - begun, 3),
            )

    async def _judge_and_post(self, episode: Episode) -> Outcome:
        """Post the judge's statements, or its earlier unsent ones, and return the outcome.

        Raises:
            JudgeFailed: the judge gave no usable answer, or `/feedback` refused it.
            NotYet: the judge must be asked again later.
            Away: the judge or `/feedback` does not answer.
            Damaged: the episode cannot be read back.
        """
        # Without the tenant: the proxy resolves names for the key's tenant.
        name, judged = bare(episode.key), (episode.id, episode.last_call_at)
        statements = self._unsent.pop(judged, None)
        if statements is None:
            line = encoded_line(episode, datetime.now(UTC), self._plan.quiet)
            try:
                statements = await self._judge.judge(name, line)
            except JudgeError:
                raise
            except Exception as error:
                if is_unavailable(error):
                    raise
                # One episode's content must not stop the judge for the others.
                raise JudgeFailed(f"the judge raised {type(error).__name__}: {error}") from error
        if not statements:
            return "cannot_tell"
        # A source makes it an opinion, which does not override facts that were stated meanwhile.
        opinions = [
            one if one.get("metric") == TOOL_STATUS else one | {"source": self._judge.name}
            for one in statements
        ]
        try:
            await self._feedback.post(opinions, idempotency_key(self._judge.name, name))
        except Away:
            self._unsent[judged] = statements
            raise
        return "judged"
