"""Sentinels: a judge that changes its mind is found, and no score of theirs is a reward."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from benchmarks.stack import free_port
from pawl.judging.errors import Away, JudgeError
from pawl.judging.run import Judging, JudgingPlan
from store.connection.engine import make_engine
from store.judge.sentinels import list_sentinels, remove_sentinels, renew, sentinels_of
from store.tenants import scoped
from store.write.ingest import Ingester
from tests.integration.pawl.judging.test_judge import Desk
from tests.support.ledger.sentinels import (
    Mood,
    all_rows,
    make_sentinels,
    names,
    newest,
    rescoring,
    score,
    scores_by_round,
)
from tests.support.records import call, reward, statement
from tests.support.waiting import eventually

HOURS_LATER = (
    "UPDATE sentinel_rounds SET begun_at = begun_at - interval '2 hours',"
    " ended_at = ended_at - interval '2 hours'"
)
BEGUN_BEFORE = "UPDATE sentinel_rounds SET begun_at = begun_at - interval '2 hours'"
REPEATED = (
    "SELECT count(*) FROM (SELECT 1 FROM sentinel_scores GROUP BY judge, episode_id, round"
    " HAVING count(*) > 1) twice"
)


async def test_a_judge_that_changes_its_mind_is_found_and_one_that_does_not_is_not(
    engine: AsyncEngine,
) -> None:
    await make_sentinels(engine, names(12))
    judge = Mood()
    with capture_logs() as logs:
        reference = await score(engine, judge, times=3)
        assert (reference.compared, reference.mean, reference.drifted) == (0, None, None)
        steady = await score(engine, judge, times=4)
        assert (steady.scored, steady.compared, steady.drifted) == (12, 12, False)
        assert (steady.mean, steady.mean_absolute) == (0, 0)
        assert steady.evidence == pytest.approx(1)
        judge.mood = 0.05
        found = await score(engine, judge, times=2)
        assert found.drifted
        assert found.mean == pytest.approx(0.05)
        assert found.mean_absolute == pytest.approx(0.05)
        assert (await score(engine, judge)).drifted
        judge.mood = 0.0
        assert (await score(engine, judge, times=4)).drifted is False
    told = [log["event"] for log in logs if log["event"].startswith("judge_")]
    assert told == ["judge_drifted", "judge_as_before"]
    # The references, and as many of the newest.
    assert await scores_by_round(engine) == dict.fromkeys([1, 2, 3, 12, 13, 14], 12)


async def test_nothing_of_a_rescoring_is_a_reward_or_changes_anything_else(
    engine: AsyncEngine,
) -> None:
    await make_sentinels(engine, names(4))
    await Ingester().store(engine, [reward(0.5, episode="e-1"), call("waits")])
    before = await all_rows(engine)
    judge = Mood()
    await score(engine, judge, times=5)
    assert await all_rows(engine) == before
    # What was said of it since is not shown: the judge sees what it saw at first.
    lines = {one for one in judge.lines if b'"e-1"' in one}
    assert len(lines) == 1
    assert b'"unscored"' in lines.pop()


async def test_a_running_judge_scores_its_sentinels_once_per_interval(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(10))
    judge, desk = Mood(), Desk()
    plan = JudgingPlan(quiet=timedelta(0), poll_s=0.01, concurrency=3)
    sentinels = rescoring(engine, judge, concurrency=3, every_s=3600)
    task = asyncio.create_task(Judging(engine, judge, desk, plan, sentinels).run())

    async def posted() -> Any:
        return len(desk.posted) == 10 and await newest(engine)

    assert [one.scored for one in await eventually(posted)] == [10]
    await Ingester().store(engine, [call("e-77")])
    await eventually(lambda: _has(desk, 11))
    task.cancel()
    await asyncio.wait([task])
    # Each was judged as an episode, and scored as a sentinel; what is posted is of the first.
    assert sorted(judge.asked) == sorted([*names(10), *names(10), "e-77"])
    assert judge.most_at_once <= 3
    assert len(await newest(engine)) == 1


async def _has(desk: Desk, number: int) -> bool:
    return len(desk.posted) == number


async def test_it_is_due_again_after_the_interval_and_never_with_0(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(2))
    judge = Mood()
    await rescoring(engine, judge, every_s=0).when_due()
    assert judge.asked == []
    for number in (1, 2):
        for _ in range(2):
            await rescoring(engine, judge, every_s=3600).when_due()
            assert len(await newest(engine)) == number
        async with engine.begin() as connection:
            await connection.execute(text(HOURS_LATER))
    # However long a round takes, the next one is due some time after its end.
    await rescoring(engine, judge, every_s=3600).when_due()
    async with engine.begin() as connection:
        await connection.execute(text(BEGUN_BEFORE))
    await rescoring(engine, judge, every_s=3600).when_due()
    assert len(await newest(engine)) == 3


async def test_several_processes_score_a_round_once(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(8))
    judges = [Mood() for _ in range(4)]
    at_work = [rescoring(engine, judge, every_s=3600) for judge in judges]
    await asyncio.gather(*(one.when_due() for one in at_work))
    assert sorted(name for judge in judges for name in judge.asked) == names(8)
    told = await asyncio.gather(
        *(rescoring(engine, judge).now() for judge in judges), return_exceptions=True
    )
    # Who comes while another is at it says so; who comes later makes a round of its own.
    refused = [one for one in told if isinstance(one, BaseException)]
    assert all(isinstance(one, JudgeError) for one in refused)
    assert set((await scores_by_round(engine)).values()) == {8}
    assert len(await newest(engine)) == 1 + len(told) - len(refused)


async def test_a_round_that_was_broken_off_goes_on_where_it_stopped(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(9))
    judge = Mood()
    judge.away_after = 4
    with pytest.raises(Away, match="restarted"):
        await rescoring(engine, judge, concurrency=1).now()
    assert await newest(engine) == []
    # A look that meets the same waits, and is no failure of the judge.
    await rescoring(engine, judge, every_s=3600).when_due()
    judge.away_after = None
    ended = await score(engine, judge)
    assert (ended.round, ended.scored, ended.unscored) == (1, 9, 0)
    assert sorted(judge.asked) == names(9)


async def test_a_cancelled_round_goes_on_too(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(9))
    judge = Mood()
    task = asyncio.create_task(rescoring(engine, judge, concurrency=1).now())
    await eventually(lambda: _asked(judge, 3))
    task.cancel()
    await asyncio.wait([task])
    assert (await score(engine, judge)).scored == 9
    assert await scores_by_round(engine) == {1: 9}
    # Only the one that was under way may be asked about twice, and is stored once.
    assert len(judge.asked) <= 10


async def _asked(judge: Mood, number: int) -> bool:
    return len(judge.asked) >= number


async def test_a_lock_that_is_lost_with_its_session_doubles_no_score(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(6))
    judge, second = Mood(), Mood()
    asked, beside = judge.judge, list[asyncio.Task[Any]]()

    async def cut(episode: str, line: bytes) -> Any:
        if len(judge.asked) == 3:
            await _end_other_sessions(engine)
            # Another process may have the lock now, and goes on with the same round.
            beside.append(asyncio.create_task(rescoring(engine, second).now()))
            await eventually(lambda: _asked(second, 1))
        return await asked(episode, line)

    judge.judge = cut  # type: ignore[method-assign]
    await rescoring(engine, judge, concurrency=1).now()
    await asyncio.gather(*beside)
    assert await scores_by_round(engine) == {1: 6}
    assert [one.scored for one in await newest(engine)] == [6]
    async with engine.connect() as connection:
        assert await connection.scalar(text(REPEATED)) == 0


async def _end_other_sessions(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        await connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )


async def test_a_database_that_is_away_is_said(database_url: str) -> None:
    away = make_engine(f"postgresql://pawl@127.0.0.1:{free_port()}/pawl")
    with pytest.raises(Away, match="PostgreSQL does not answer"):
        await rescoring(away, Mood()).now()
    with capture_logs() as logs:
        await rescoring(away, Mood()).when_due()
    assert [log["event"] for log in logs] == ["sentinels_wait"]
    await away.dispose()


async def test_what_a_judge_cannot_score_is_counted_and_says_why(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(5), draws=1)
    judge = Mood()
    await score(engine, judge)
    judge.fails = {"e-1", "e-2"}
    ended = await score(engine, judge)
    assert (ended.scored, ended.unscored, ended.compared) == (3, 2, 3)
    async with engine.connect() as connection:
        lines = {one.episode: one for one in await list_sentinels(connection, "mood")}
    assert (lines["e-1"].outcome, lines["e-1"].reason) == ("failed", "no opinion of e-1")
    assert (lines["e-3"].reference, lines["e-3"].score, lines["e-3"].drawn) == (0.03, 0.03, 1)


async def test_a_judge_is_not_asked_about_what_has_changed_until_it_is_renewed(
    engine: AsyncEngine,
) -> None:
    await make_sentinels(engine, names(3), draws=1)
    judge = Mood()
    await score(engine, judge, times=2)
    await Ingester().store(engine, [call("e-1"), statement("style", 1.0, episode="e-2")])
    judge.asked.clear()
    ended = await score(engine, judge)
    assert (ended.scored, ended.changed, ended.unscored, ended.gone) == (2, 1, 0, 0)
    assert sorted(judge.asked) == ["e-0", "e-2"]
    await _renew(engine)
    again = await score(engine, judge)
    assert (again.scored, again.changed, again.compared) == (3, 0, 0)
    assert (await score(engine, judge)).compared == 3


async def _renew(engine: AsyncEngine) -> None:
    from pawl.judging.sentinels.choosing import Choice, as_shown

    async with engine.begin() as connection:
        ids = [one.episode_id for one in await sentinels_of(connection, "mood")]
        assert await renew(connection, "mood", await as_shown(connection, ids, Choice())) == 3


async def test_a_judge_that_is_accepted_as_it_is_has_drifted_no_more(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(3), draws=3)
    judge = Mood()
    plan = {"evidence": 20.0}
    for mood in (0, 0, 0, 0.2, 0.2, 0.2):
        judge.mood = mood
        last = await rescoring(engine, judge, **plan).now()
    assert last.drifted
    await _renew(engine)
    for compared in (0, 0, 0, 3):
        last = await rescoring(engine, judge, **plan).now()
        assert (last.compared, bool(last.drifted)) == (compared, False)


async def test_judges_and_tenants_are_apart(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(2))
    await make_sentinels(engine, ["f-5"], judge="other")
    await make_sentinels(engine, [scoped("a", "e-1"), scoped("a", "e-9")])
    of_default, other, of_a = Mood(), Mood("other"), Mood()
    await score(engine, of_default)
    await score(engine, other)
    await rescoring(engine, of_a, tenant="a").now()
    assert (sorted(of_default.asked), other.asked) == (names(2), ["f-5"])
    assert sorted(of_a.asked) == ["e-1", "e-9"]
    [ended] = await newest(engine, scoped("a", "mood"))
    assert (ended.tenant, ended.judge, ended.scored) == ("a", "mood", 2)
    async with engine.begin() as connection:
        assert await remove_sentinels(connection, "mood") == 2
    with pytest.raises(JudgeError, match="no sentinels"):
        await score(engine, of_default)
    assert (await rescoring(engine, of_a, tenant="a").now()).scored == 2
