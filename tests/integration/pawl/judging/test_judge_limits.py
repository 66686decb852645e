"""How often, how many at once, and for how long episodes are judged."""

import asyncio
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.stack import free_port
from pawl.export import Selection
from pawl.judging.answers import Away, JudgeError, JudgeFailed, Statement
from pawl.judging.feedback import FeedbackClient
from pawl.judging.program import ProgramJudge
from pawl.judging.run import Judging
from store.judging import forget_unjudged
from store.tenants import scoped
from tests.integration.pawl.judging.test_judge import (
    LONG_AGO,
    PLAN,
    Bench,
    Desk,
    Opinion,
    bench,
    outcomes,
    session,
    set_due,
    store,
)
from tests.support.records import call, reward
from tests.support.waiting import eventually

__all__ = ["bench", "session"]


# How often, how many, and for how long


async def test_a_failed_judgement_is_tried_again_a_bounded_number_of_times(
    engine: AsyncEngine, bench: Bench
) -> None:
    await store(engine, call("crash-1"))
    plan = msgspec.structs.replace(PLAN, attempts=3)
    for attempt in range(1, 6):
        await Judging(engine, bench.judge, Desk(), plan).run(once=True)
        [(outcome, attempts, _)] = (await outcomes(engine)).values()
        assert (outcome, attempts) == ("failed", min(attempt, 3))
        await set_due(engine)
    assert len(bench.asked) == 3


async def test_an_episode_that_goes_on_is_news_again(engine: AsyncEngine, bench: Bench) -> None:
    await store(engine, call("unsure-1", started_at=LONG_AGO), call("good-1", started_at=LONG_AGO))
    desk = Desk()
    await Judging(engine, bench.judge, desk, PLAN).run(once=True)
    await store(engine, call("unsure-1"), call("good-1"))
    await Judging(engine, bench.judge, desk, PLAN).run(once=True)
    # What was judged stays judged: its score is on its way.
    assert bench.asked == ["good-1", "unsure-1", "unsure-1"]


async def test_a_judgement_has_a_time_limit(engine: AsyncEngine, bench: Bench) -> None:
    await store(engine, call("slow-1"))
    judge = ProgramJudge(bench.command, timeout_s=0.5, name="hasty")
    assert await Judging(engine, judge, Desk(), PLAN).run(once=True) == {"failed": 1}
    assert (await outcomes(engine))["slow-1"] == ("failed", 1, "no answer within 0.5 s")


async def test_what_a_judge_leaves_running_does_not_hold_up_its_verdict(
    engine: AsyncEngine, bench: Bench
) -> None:
    await store(engine, call("child-1"))
    judge = ProgramJudge(bench.command, timeout_s=50, name="parent")
    async with asyncio.timeout(40):
        assert await Judging(engine, judge, Desk(), PLAN).run(once=True) == {"judged": 1}
    assert (await outcomes(engine))["child-1"][0] == "judged"


async def test_a_few_are_judged_at_once_and_no_more(engine: AsyncEngine) -> None:
    await store(engine, *(call(f"e{number}") for number in range(30)))
    judge, desk, three = Opinion(), Desk(), asyncio.Event()
    under_way: list[int] = [0]

    async def together(episode: str, line: bytes) -> list[Statement]:
        under_way.append(under_way[-1] + 1)
        if under_way[-1] == 3:
            three.set()
        await three.wait()
        # Those that could begin wrongly beside these have time to.
        await asyncio.sleep(0.01)
        under_way.append(under_way[-1] - 1)
        return [{"value": 1, "episode": episode}]

    judge.judge = together  # type: ignore[method-assign]
    plan = msgspec.structs.replace(PLAN, concurrency=3)
    assert await Judging(engine, judge, desk, plan).run(once=True) == {"judged": 30}
    assert max(under_way) == 3
    assert len(desk.posted) == 30


async def test_whoever_scores_meanwhile_is_not_contradicted(engine: AsyncEngine) -> None:
    await store(engine, call("e"))
    judge, desk = Opinion(), Desk()
    asked = judge.judge

    async def slowly(episode: str, line: bytes) -> list[Statement]:
        await store(engine, reward(0.1, episode="e"))
        return await asked(episode, line)

    judge.judge = slowly  # type: ignore[method-assign]
    await Judging(engine, judge, desk, PLAN).run(once=True)
    assert desk.posted == {}


async def test_one_judge_runs_once_at_a_time(engine: AsyncEngine) -> None:
    first = asyncio.create_task(Judging(engine, Opinion(), Desk(), PLAN).run())
    await eventually(lambda: somebody_judges(engine))
    with pytest.raises(JudgeError, match="at work already"):
        await Judging(engine, Opinion(), Desk(), PLAN).run(once=True)
    await cancelled(first)
    assert await Judging(engine, Opinion(), Desk(), PLAN).run(once=True) == {}


async def test_tenants_have_judges_of_one_name_at_once(engine: AsyncEngine) -> None:
    for tenant in ("a", "b"):
        await store(engine, call(scoped(tenant, "e")), call(scoped(tenant, f"only {tenant}")))
    plans = {
        tenant: msgspec.structs.replace(PLAN, selection=Selection(tenant=tenant))
        for tenant in ("a", "b")
    }
    judges = {tenant: Opinion() for tenant in plans}
    first = asyncio.create_task(Judging(engine, judges["a"], Desk(), plans["a"]).run())
    await eventually(lambda: somebody_judges(engine))
    tally = await Judging(engine, judges["b"], Desk(), plans["b"]).run(once=True)
    assert tally == {"judged": 2}
    await cancelled(first)
    assert sorted(judges["b"].asked) == ["e", "only b"]
    assert "only b" not in judges["a"].asked


async def test_again_asks_about_the_tenants_episodes_alone(
    engine: AsyncEngine, bench: Bench
) -> None:
    await store(engine, *(call(scoped(tenant, "unsure-1")) for tenant in ("a", "b")))
    await Judging(engine, bench.judge, Desk(), PLAN).run(once=True)
    assert len(bench.asked) == 2
    async with engine.begin() as connection:
        assert await forget_unjudged(connection, bench.judge.name, "a") == 1
    assert list(await outcomes(engine)) == [scoped("b", "unsure-1")]


async def somebody_judges(engine: AsyncEngine) -> bool:
    """Whether somebody holds the lock of a judge's name."""
    held = (
        "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
        " WHERE l.locktype = 'advisory' AND l.granted AND d.datname = current_database()"
    )
    async with engine.connect() as connection:
        return bool(await connection.scalar(text(held)))


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_desk_that_is_closed_costs_no_episode_and_no_second_judgement(
    engine: AsyncEngine,
) -> None:
    await store(engine, call("e"))
    judge, desk = Opinion(), Desk()
    desk.away = True
    with pytest.raises(Away, match="closed"):
        await Judging(engine, judge, desk, PLAN).run(once=True)
    assert await outcomes(engine) == {}
    judging = Judging(engine, judge, desk, PLAN)
    desk.refused.clear()
    task = asyncio.create_task(judging.run())
    await desk.refused.wait()
    desk.away = False

    async def posted() -> Any:
        return desk.posted and await outcomes(engine)

    assert (await eventually(posted))["e"] == ("judged", 1, None)
    await cancelled(task)
    assert judge.asked == ["e", "e"]


async def test_a_proxy_that_is_away_is_asked_again_for_a_while(
    session: aiohttp.ClientSession,
) -> None:
    desk = FeedbackClient(session, f"http://127.0.0.1:{free_port()}/feedback", patience_s=0.6)
    with pytest.raises(Away, match="does not answer"):
        await desk.post([{"value": 1, "episode": "e"}], "k")


async def test_a_program_that_does_not_read_is_heard_all_the_same() -> None:
    judge = ProgramJudge(["echo", '{"value": 0.5}'], timeout_s=5)
    assert await judge.judge("e", b"x" * 10**6) == [{"value": 0.5, "episode": "e"}]
    with pytest.raises(JudgeFailed, match="exit code 1"):
        await ProgramJudge(["false"], timeout_s=5).judge("e", b"{}")
