"""Make sentinels in tests, and score them by a judge in this process."""

import asyncio
from collections.abc import Sequence
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.judging.answers import Statement
from pawl.judging.errors import Away, JudgeFailed
from pawl.judging.sentinels.choosing import Choice, chosen
from pawl.judging.sentinels.rescoring import Rescoring, SentinelPlan
from store.deleting.choosing import named
from store.judge.judgements import Judgement, note
from store.judge.rounds import Round, rounds
from store.judge.sentinels import add_sentinels
from store.tenants import scoped, tenant_of
from store.write.ingest import Ingester
from tests.support.records import START, call, reward

ALL = "SELECT round, count(*) AS scores FROM sentinel_scores GROUP BY round ORDER BY round"


class Mood:
    """A judge whose score of an episode named `…-N` is N hundredths, and its mood on top."""

    def __init__(self, name: str = "mood") -> None:
        self.name = name
        self.mood = 0.0
        self.asked: list[str] = []
        self.lines: list[bytes] = []
        self.fails: set[str] = set()
        # Of these its server will hear nothing, whenever it is asked.
        self.refuses: set[str] = set()
        self.refusals = 0
        self.away_after: int | None = None
        self.at_once = 0
        self.most_at_once = 0

    async def judge(self, episode: str, line: bytes) -> list[Statement]:
        if self.away_after is not None and len(self.asked) >= self.away_after:
            raise Away("the model's server is restarted")
        if episode in self.refuses:
            self.refusals += 1
            raise Away(f"the model's server answered 429 about {episode}")
        self.asked.append(episode)
        self.lines.append(line)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.005)
        self.at_once -= 1
        if episode in self.fails:
            raise JudgeFailed(f"no opinion of {episode}")
        return [{"value": int(episode.rpartition("-")[2]) / 100 + self.mood, "episode": episode}]


def names(number: int) -> list[str]:
    """The names of episodes that `Mood` has a score for."""
    return [f"e-{one}" for one in range(number)]


async def judged(engine: AsyncEngine, scores: dict[str, float], judge: str = "mood") -> None:
    """Store episodes that a judge has scored."""
    await Ingester().store(engine, [call(key) for key in scores])
    await Ingester().store(engine, [reward(score, episode=key) for key, score in scores.items()])
    async with engine.begin() as connection:
        for key in scores:
            [whole] = (await named(connection, [key])).wholes
            verdict = Judgement(
                episode_id=whole,
                judge=judge,
                outcome="judged",
                attempts=1,
                last_call_at=START,
            )
            await note(connection, verdict)


async def make_sentinels(
    engine: AsyncEngine, keys: Sequence[str], judge: str = "mood", draws: int = 3
) -> None:
    """Store an episode of one call for each name that is as it is kept, as sentinels."""
    await Ingester().store(engine, [call(key) for key in keys])
    bare = tuple(key.rpartition("\x1f")[2] for key in keys)
    kept = scoped(tenant_of(keys[0]), judge)
    async with engine.begin() as connection:
        found = await chosen(connection, kept, Choice(names=bare))
        assert await add_sentinels(connection, kept, found, draws) == len(keys)


def rescoring(engine: AsyncEngine, judge: Any, **plan: Any) -> Rescoring:
    """Score a judge's sentinels by a plan, without long pauses."""
    return Rescoring(engine, judge, SentinelPlan(**{"again_s": (0.01, 0.02)} | plan))


async def score(engine: AsyncEngine, judge: Any, times: int = 1) -> Round:
    """Score a judge's sentinels at once, some times; what the last round came to."""
    for _ in range(times):
        last = await rescoring(engine, judge).now()
    return last


async def newest(engine: AsyncEngine, judge: str = "mood", most: int = 100) -> list[Round]:
    """The rounds of a judge that ended, the newest first."""
    async with engine.connect() as connection:
        return await rounds(connection, judge, most)


async def scores_by_round(engine: AsyncEngine) -> dict[int, int]:
    """How many scores, and failures, each round has."""
    async with engine.connect() as connection:
        return {row.round: row.scores for row in await connection.execute(text(ALL))}


async def all_rows(engine: AsyncEngine, *, without: str = "sentinel") -> dict[str, list[str]]:
    """Every row of every table whose name does not begin so, as text."""
    tables = (
        "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
        " AND table_type = 'BASE TABLE' ORDER BY 1"
    )
    async with engine.connect() as connection:
        found = list((await connection.execute(text(tables))).scalars())
        return {
            table: sorted(
                (await connection.execute(text(f'SELECT t::text FROM "{table}" t'))).scalars()
            )
            for table in found
            if not table.startswith(without)
        }
