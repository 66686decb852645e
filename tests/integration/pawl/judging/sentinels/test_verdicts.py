"""What is known of a judge: by rounds that could show a drift, since the references were taken."""

from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from pawl.judging.sentinels.choosing import take_new_references
from pawl.judging.sentinels.tables import in_words, verdict_in_words
from store.judge.rounds import Watched, watched
from store.judge.sentinels import remove_sentinels
from store.write.ingest import Ingester
from tests.support.ledger.sentinels import Mood, make_sentinels, names, newest, score
from tests.support.records import call


async def known(engine: AsyncEngine) -> Watched:
    async with engine.connect() as connection:
        [one] = await watched(connection, "mood")
        assert await watched(connection) == [one]
    return one


async def run(engine: AsyncEngine, work: Any, *arguments: Any) -> None:
    async with engine.begin() as connection:
        assert await work(connection, "mood", *arguments)


async def drifting(engine: AsyncEngine) -> Mood:
    """A judge of 12 sentinels, found to have drifted."""
    await make_sentinels(engine, names(12))
    judge = Mood()
    await score(engine, judge, times=3)
    judge.mood = 0.3
    assert (await score(engine, judge)).drifted
    return judge


async def test_a_round_that_could_not_show_a_drift_heals_none(engine: AsyncEngine) -> None:
    judge = await drifting(engine)
    judge.mood, judge.fails = 0.0, set(names(12)[2:])
    with capture_logs() as logs:
        few = await score(engine, judge)
        judge.fails = set(names(12))
        none = await score(engine, judge)
    assert (few.compared, few.drifted, few.mean) == (2, None, 0)
    assert (none.compared, none.drifted, none.mean) == (0, None, None)
    told = [log["event"] for log in logs if log["event"] != "sentinels_scored"]
    assert told == ["sentinels_too_few", "sentinels_too_few"]
    assert all(log["log_level"] == "warning" for log in logs if "too_few" in log["event"])
    one = await known(engine)
    assert (one.drifted, one.last) == (True, none)
    assert "HAS DRIFTED, by an earlier round" in verdict_in_words(one)
    assert "too few sentinels" in in_words(few)
    # One that could show it, and does not, does.
    judge.fails = set()
    with capture_logs() as logs:
        assert (await score(engine, judge, times=3)).drifted is False
    assert "judge_as_before" in [log["event"] for log in logs]
    assert (await known(engine)).drifted is False


async def test_what_was_known_is_known_no_more_once_the_judge_is_renewed(
    engine: AsyncEngine,
) -> None:
    await drifting(engine)
    assert (await known(engine)).drifted is True
    await run(engine, take_new_references)
    one = await known(engine)
    assert (one.drifted, one.last, one.sentinels) == (None, None, 12)
    assert "nothing is known" in verdict_in_words(one)
    assert len(await newest(engine)) == 4


async def test_rounds_of_other_sentinels_say_nothing_of_those_that_are_there(
    engine: AsyncEngine,
) -> None:
    judge = await drifting(engine)
    await run(engine, remove_sentinels)
    async with engine.connect() as connection:
        assert await watched(connection) == []
    await make_sentinels(engine, ["f-1"])
    assert (await known(engine)).last is None
    with capture_logs() as logs:
        await score(engine, judge)
    one = await known(engine)
    assert (one.drifted, one.last is not None) == (None, True)
    assert "not all references" in verdict_in_words(one)
    assert [log["event"] for log in logs] == ["sentinels_scored"]


async def test_a_round_that_has_not_ended_is_told_with_its_beginning(engine: AsyncEngine) -> None:
    await make_sentinels(engine, names(3))
    assert (await known(engine)).unfinished_since is None
    async with engine.begin() as connection:
        await connection.execute(
            text("INSERT INTO sentinel_rounds (judge, round) VALUES ('mood', 1)")
        )
        begun = await connection.scalar(text("SELECT begun_at FROM sentinel_rounds"))
    assert (await known(engine)).unfinished_since == begun
    await score(engine, Mood())
    assert (await known(engine)).unfinished_since is None


async def test_sentinels_that_all_have_changed_are_told_of(engine: AsyncEngine) -> None:
    judge = await drifting(engine)
    await Ingester().store(engine, [call(key) for key in names(12)])
    with capture_logs() as logs:
        ended = await score(engine, judge)
    assert (ended.scored, ended.changed) == (0, 12)
    assert "pawl sentinels renew" in in_words(ended)
    assert "yet" not in in_words(ended).partition("(")[0]
    assert "sentinels_too_few" in [log["event"] for log in logs]
    assert (await known(engine)).drifted is True
