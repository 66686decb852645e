"""Rounds of sentinels end, whoever refuses what, and take turns with episodes."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.judging.errors import Away
from pawl.judging.run import Judging, JudgingPlan
from pawl.judging.sentinels.choosing import take_new_references
from pawl.judging.sentinels.rescoring import TURN
from store.judge.rounds import compared_in, due_in, watched
from store.judge.sentinels import list_sentinels
from tests.integration.pawl.judging.test_judge import Desk
from tests.support.ledger.sentinels import (
    Mood,
    make_sentinels,
    names,
    newest,
    rescoring,
    score,
    scores_by_round,
)
from tests.support.waiting import eventually

KEPT = "SELECT count(*) FROM sentinel_scores s JOIN episodes e ON e.id = s.episode_id"


async def outcomes(engine: AsyncEngine) -> dict[str, tuple[Any, Any]]:
    """What came of each sentinel last, and why."""
    async with engine.connect() as connection:
        found = await list_sentinels(connection, "mood")
    return {one.episode: (one.outcome, one.reason) for one in found}


async def test_what_is_under_way_is_kept_when_one_is_refused(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(9))
    judge, all_are_asked, seen = Mood(), asyncio.Event(), list[str]()
    asked = judge.judge

    async def limited(episode: str, line: bytes) -> Any:
        seen.append(episode)
        if len(seen) > 4:
            raise Away("429")
        if len(seen) == 4:
            all_are_asked.set()
        await all_are_asked.wait()
        if episode == seen[0]:
            raise Away("429")
        return await asked(episode, line)

    judge.judge = limited  # type: ignore[method-assign]
    with pytest.raises(Away, match="429"):
        await rescoring(engine, judge, concurrency=4).now()
    # Three were being asked when one was refused, and no answer is lost; then another was refused.
    assert sorted(judge.asked) == sorted(seen[1:4])
    assert await scores_by_round(engine) == {1: 3}
    assert len(seen) == 5
    del judge.judge  # type: ignore[method-assign]
    ended = await score(engine, judge)
    assert (ended.round, ended.scored, ended.unscored) == (1, 9, 0)
    assert sorted(judge.asked) == names(9)


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("poison", [["e-0"], ["e-1", "e-4"]])
async def test_a_sentinel_that_alone_is_refused_each_time_fails_and_the_round_ends(
    engine: AsyncEngine, concurrency: int, poison: list[str]
) -> None:
    await make_sentinels(engine, names(7))
    judge = Mood()
    judge.refuses = set(poison)

    async def ended() -> Any:
        try:
            return await rescoring(engine, judge, concurrency=concurrency).now()
        except Away:
            return None

    last = await eventually(ended)
    assert (last.scored, last.unscored) == (7 - len(poison), len(poison))
    told = await outcomes(engine)
    for one in poison:
        outcome, reason = told[one]
        assert outcome == "failed"
        assert "refused each time, while another sentinel was answered" in reason
        assert "429" in reason
    assert await scores_by_round(engine) == {1: 7}


async def test_one_that_is_refused_once_is_asked_again(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(5))
    judge = Mood()
    judge.refuses = {"e-3"}
    asked = judge.judge

    async def once(episode: str, line: bytes) -> Any:
        try:
            return await asked(episode, line)
        except Away:
            judge.refuses = set()
            raise

    judge.judge = once  # type: ignore[method-assign]
    ended = await score(engine, judge)
    assert (ended.scored, ended.unscored, judge.refusals) == (5, 0, 1)


async def test_a_server_that_goes_away_fails_nobody(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(6))
    judge = Mood()
    for left in (3, 1, 0):
        judge.away_after = 6 - left if left else len(judge.asked)
        if left:
            with pytest.raises(Away, match="restarted"):
                await rescoring(engine, judge, concurrency=2).now()
    assert {outcome for outcome, _ in (await outcomes(engine)).values()} == {"scored", None}
    # Nor a single one that is left, or that is all there is.
    with pytest.raises(Away, match="restarted"):
        await rescoring(engine, judge).now()
    judge.away_after = None
    assert (await score(engine, judge)).scored == 6


async def test_a_judge_of_one_sentinel_that_is_refused_waits(engine: AsyncEngine) -> None:
    await make_sentinels(engine, ["e-1"])
    judge = Mood()
    judge.refuses = {"e-1"}
    for _ in range(2):
        with pytest.raises(Away, match="429"):
            await score(engine, judge)
    assert await scores_by_round(engine) == {}


async def test_episodes_and_sentinels_take_turns(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(3 * TURN))
    judge, desk = Mood(), Desk()
    plan = JudgingPlan(quiet=timedelta(0), poll_s=30, concurrency=1)
    sentinels = rescoring(engine, judge, concurrency=1, every_s=3600)
    task = asyncio.create_task(Judging(engine, judge, desk, plan, sentinels).run())
    # No turn waits for a pause between looks for episodes.
    await eventually(lambda: _ended(engine))
    task.cancel()
    await asyncio.wait([task])
    first = set(judge.asked[:TURN])
    assert len(first) == TURN
    # Then came episodes, of which some are the same.
    assert len(desk.posted) >= TURN
    assert first & set(judge.asked[TURN:-TURN])
    assert [one.scored for one in await newest(engine)] == [3 * TURN]


async def test_where_no_episode_waits_turns_follow_at_once(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(3 * TURN))
    plan = JudgingPlan(quiet=timedelta(days=99), poll_s=3600, concurrency=1)
    sentinels = rescoring(engine, Mood(), concurrency=1, every_s=3600)
    task = asyncio.create_task(Judging(engine, Mood(), Desk(), plan, sentinels).run())
    await eventually(lambda: _ended(engine))
    task.cancel()
    await asyncio.wait([task])


async def _ended(engine: AsyncEngine) -> bool:
    return bool(await newest(engine))


async def test_scores_that_are_compared_with_nothing_any_more_go(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(3), draws=2)
    judge = Mood()
    for round_ in range(1, 10):
        judge.mood = round_ / 10
        # What failed in between is no reference, and none of the newest.
        judge.fails = {"e-1"} if round_ in (1, 8) else set()
        await score(engine, judge)
    async with engine.connect() as connection:
        compared = await compared_in(connection, "mood", 9)
        kept = await connection.scalar(text(KEPT + " WHERE e.key = 'e-1'"))
    assert kept == 4
    found = [(one.references, one.newest) for one in compared]
    moods = [[0.1, 0.2, 0.8, 0.9], [0.2, 0.3, 0.7, 0.9], [0.1, 0.2, 0.8, 0.9]]
    told = sorted([round(one, 2) for one in (*first, *last)] for first, last in found)
    assert told == sorted(
        [round(mood + hundredth / 100, 2) for mood in one] for hundredth, one in enumerate(moods)
    )


async def test_scores_before_new_references_go(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(3))
    await score(engine, Mood(), times=2)
    async with engine.begin() as connection:
        assert await take_new_references(connection, "mood") == 3
    await score(engine, Mood())
    assert await scores_by_round(engine) == {3: 3}
    assert len(await newest(engine)) == 3


@pytest.mark.parametrize("scored", [2, 0])
async def test_new_references_in_the_middle_of_a_round_are_scored_at_once(
    engine: AsyncEngine, scored: int
) -> None:
    """The round that nobody is in any more ends, and asks nobody."""
    await make_sentinels(engine, names(3))
    judge = Mood()
    asked = judge.judge

    async def until_away(episode: str, line: bytes) -> Any:
        if len(judge.asked) >= scored:
            raise Away("429")
        return await asked(episode, line)

    judge.judge = until_away  # type: ignore[method-assign]
    with pytest.raises(Away):
        await rescoring(engine, judge, concurrency=1).now()
    async with engine.begin() as connection:
        assert await take_new_references(connection, "mood") == 3
    del judge.judge  # type: ignore[method-assign]
    ended = await rescoring(engine, judge).now()
    assert (ended.round, ended.scored) == (2, 3)
    async with engine.connect() as connection:
        assert await due_in(connection, "mood", 3600.0) == pytest.approx(3600.0, abs=60.0)
        [of_judge] = await watched(connection, "mood")
        assert of_judge.unfinished_since is None


async def test_new_references_of_all_are_due_at_once(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(2))
    await score(engine, Mood())
    async with engine.begin() as connection:
        assert await due_in(connection, "mood", 3600.0) != 0
        await take_new_references(connection, "mood")
        assert await due_in(connection, "mood", 3600.0) == 0
