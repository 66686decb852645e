"""What the episodes of each arm came to: who counts, in which order, with which reward."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.ids import lowest_id_at
from store.read.gates import (
    ArmEpisode,
    arm_episodes,
    begun_episodes,
    episodes_per_hour,
)
from store.records import CallRecord, SpoolRecord
from store.tenants import scoped
from store.versions import policy_name
from store.write.ingest import Ingester
from tests.support.records import ago, call, reward, tool_event

ARM_OF = {0: "control", 1: "serving", 2: "canary"}
SINCE_S = 1000.0
UNTIL_S = 100.0
# What comes so long after an episode's beginning does not count.
COUNTS_S = 300.0


def given_call(key: str, version: int, ago_s: float, number: int = 0, **changes: Any) -> CallRecord:
    """A call of `version` that began `ago_s` seconds ago, and was given to its arm by chance."""
    fields = {"arm": ARM_OF.get(version), "served_model": policy_name("m", version, "m")}
    return call(key, policy_version=version, **{**ago(ago_s, number), **fields, **changes})


async def evidence(
    engine: AsyncEngine, records: list[SpoolRecord], most: int = 1000, *, soon: bool = False
) -> list[ArmEpisode]:
    """Those begun in time that count by now, which are found in parts of this length."""
    await Ingester().store(engine, records)
    now = datetime.now(UTC)
    found: list[Any] = []
    first, until = lowest_id_at(now - timedelta(seconds=SINCE_S)), now - timedelta(seconds=UNTIL_S)
    async with engine.connect() as connection:
        while part := await begun_episodes(connection, "m", first, until, most):
            found += part
            first = UUID(int=part[-1].first_call_id.int + 1)
        within = timedelta(seconds=COUNTS_S)
        counted = await arm_episodes(connection, "m", found, until=now, within=within, soon=soon)
    return [one for one in counted if one.arm is not None]


async def keys(engine: AsyncEngine, found: list[ArmEpisode]) -> list[str]:
    async with engine.connect() as connection:
        rows = await connection.execute(text("SELECT id, key FROM episodes"))
        names = {row.id: row.key for row in rows}
    return [names[one.id] for one in found]


async def test_evidence_has_the_periods_episodes_in_order_of_first_calls(
    engine: AsyncEngine,
) -> None:
    records = [
        given_call("third", 2, 400),
        given_call("second", 1, 500),
        given_call("first", 0, 600),
        given_call("before", 1, 1200),
        given_call("before", 1, 300),
        given_call("too-late", 1, 50),
    ]
    found = await evidence(engine, records)
    assert await keys(engine, found) == ["first", "second", "third"]
    assert [(one.arm, one.version) for one in found] == [
        ("control", 0),
        ("serving", 1),
        ("canary", 2),
    ]


async def test_evidence_leaves_out_episodes_that_were_assigned_no_arm(engine: AsyncEngine) -> None:
    records = [
        given_call("counts", 1, 500),
        given_call("eval", 1, 500, 1, arm=None, split="eval"),
        given_call("named", 2, 500, 2, arm=None),
        # It had an arm later, but named its version first.
        given_call("named-first", 2, 500, 3, arm=None),
        given_call("named-first", 1, 400, 3),
        given_call("doubtful", 1, 500, 4, confidence="doubtful"),
        given_call("other-policy", 1, 500, 6, policy="n"),
    ]
    assert await keys(engine, await evidence(engine, records)) == ["counts"]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 100])
async def test_evidence_is_complete_for_any_page_size(engine: AsyncEngine, most: int) -> None:
    records = [
        given_call("1", 1, 500),
        given_call("in-no-arm", 1, 490, arm=None),
        given_call("in-no-arm-either", 1, 480, arm=None),
        given_call("2", 2, 470),
        # Of one millisecond.
        given_call("3", 0, 460, 1),
        given_call("4", 1, 460, 2),
        given_call("5", 2, 460, 3),
        given_call("6", 1, 450),
    ]
    found = await evidence(engine, list(reversed(records)), most=most)
    assert await keys(engine, found) == ["1", "2", "3", "4", "5", "6"]


async def test_rewards_and_calls_after_the_reward_deadline_do_not_count_as_evidence(
    engine: AsyncEngine,
) -> None:
    def late(value: float, episode: str, ago_s: float) -> SpoolRecord:
        at = datetime.now(UTC) - timedelta(seconds=ago_s)
        return msgspec.structs.replace(reward(value, episode=episode), at=at)

    records: list[SpoolRecord] = [
        given_call("in-time", 1, 900),
        late(0.25, "in-time", 650),
        given_call("corrected", 1, 890),
        late(0.5, "corrected", 700),
        late(1.0, "corrected", 500),
        given_call("too-late", 1, 880),
        late(1.0, "too-late", 500),
        given_call("went-on", 2, 870, total_ms=1000.0),
        given_call("went-on", 2, 500, http_status=400, status="upstream_error", total_ms=9000.0),
        given_call("ended-late", 2, 860, total_ms=COUNTS_S * 1000 + 10),
        # A later call that is under way says only how long it has been so.
        given_call("under-way", 1, 850, total_ms=1000.0),
        given_call("under-way", 1, 750, http_status=None, status="upstream_error", total_ms=1e6),
        # An episode that another policy's call began.
        given_call("of-two", 1, 840, policy="n", total_ms=1000.0),
        given_call("of-two", 2, 640, total_ms=1e6),
    ]
    found = await evidence(engine, records)
    said = dict(zip(await keys(engine, found), found, strict=True))
    assert {name: one.reward for name, one in said.items()} == {
        "in-time": 0.25,
        "corrected": 0.5,
        "too-late": None,
        "went-on": None,
        "ended-late": None,
        "under-way": None,
        "of-two": None,
    }
    went_on = said["went-on"]
    assert (went_on.failed, went_on.seconds) == (False, 1.0)
    assert {name: one.arm for name, one in said.items() if one.failed} == {
        "ended-late": "canary",
        "of-two": "canary",
    }
    assert said["ended-late"].seconds == pytest.approx(COUNTS_S, abs=0.01)
    assert said["under-way"].seconds == pytest.approx((1.0 + COUNTS_S - 100.0) / 2, abs=0.01)
    assert said["of-two"].seconds == pytest.approx(COUNTS_S - 200.0, abs=0.01)


async def test_scored_episodes_count_as_evidence_at_once_in_the_order_of_their_rewards(
    engine: AsyncEngine,
) -> None:
    def given(value: float, episode: str, ago_s: float) -> SpoolRecord:
        at = datetime.now(UTC) - timedelta(seconds=ago_s)
        return msgspec.structs.replace(reward(value, episode=episode), at=at)

    records: list[SpoolRecord] = [
        given_call("slow", 1, 160),
        given(1.0, "slow", 110),
        given_call("quick", 0, 150),
        given(0.5, "quick", 140),
        # It counts as it was then.
        given(1.0, "quick", 120),
        given_call("waits", 2, 140),
        given_call("unscored", 2, 900),
    ]
    found = await evidence(engine, records, soon=True)
    names = await keys(engine, found)
    assert names == ["unscored", "quick", "slow"]
    assert [one.reward for one in found] == [None, 0.5, 1.0]


async def test_episode_counts_for_the_arm_of_its_first_call(
    engine: AsyncEngine,
) -> None:
    records = [given_call("e", 2, 500), given_call("e", 1, 400, arm="serving")]
    [one] = await evidence(engine, records)
    assert (one.arm, one.version) == ("canary", 2)


async def test_joined_episode_counts_once_with_its_parts_reward(engine: AsyncEngine) -> None:
    said = (b"1" * 16,)
    records: list[SpoolRecord] = [
        given_call("whole", 2, 500, method="own", provides=said),
        given_call("part", 1, 400, method="own", needs=said),
        reward(0.25, episode="part"),
    ]
    [one] = await evidence(engine, records)
    assert (one.arm, one.reward) == ("canary", 0.25)


async def test_evidence_has_reward_failure_malformed_tools_and_duration(
    engine: AsyncEngine,
) -> None:
    asked = [given_call("paid", 1, 700), given_call("by-call", 1, 690)]
    records: list[SpoolRecord] = [
        *asked,
        reward(0.5, episode="paid", at=1),
        reward(0.75, episode="paid", at=2),
        reward(1.0, call=str(asked[1].id)),
        given_call("unscored", 2, 680),
        given_call("refused", 2, 670, http_status=400, status="upstream_error"),
        given_call("mended", 2, 660, http_status=503, status="upstream_error", total_ms=500.0),
        given_call("mended", 2, 650, total_ms=1500.0),
        given_call("torn", 2, 640, status="truncated"),
        given_call("gone", 2, 630, status="client_gone", http_status=None),
        given_call("tools", 2, 620, tool_events=(tool_event("malformed", "a"),)),
        given_call("good-tools", 2, 610, tool_events=(tool_event("ok", "b"),)),
        given_call("bad-tools", 2, 590, tool_events=(tool_event("error", "d"),)),
    ]
    found = await evidence(engine, records)
    names = await keys(engine, found)
    said = dict(zip(names, found, strict=True))
    assert {name: one.reward for name, one in said.items() if one.reward is not None} == {
        "paid": 0.75,
        "by-call": 1.0,
    }
    assert [name for name, one in said.items() if one.failed] == ["refused", "mended", "torn"]
    assert {name: one.malformed for name, one in said.items() if one.malformed is not None} == {
        "tools": True,
        "good-tools": False,
        "bad-tools": False,
    }
    assert said["mended"].seconds == 1.0


async def test_evidence_has_the_family_of_each_task(engine: AsyncEngine) -> None:
    records = [
        given_call("a", 1, 500, 1, task="sql/easy-1"),
        given_call("b", 1, 500, 2, task="sql/easy-22"),
        given_call("c", 1, 500, 3, task="sum7"),
        given_call("d", 1, 500, 4, task=scoped("other", "sum8")),
        given_call("e", 1, 500, 5),
    ]
    found = await evidence(engine, list(records))
    assert [one.family for one in found] == ["sql", "sql", "sum", "sum", "prompt"]


async def test_new_episodes_of_the_last_day_are_counted(engine: AsyncEngine) -> None:
    hour_s = 3600
    records: list[SpoolRecord] = [
        *(given_call(f"e{number}", 1, number * hour_s) for number in range(1, 23, 2)),
        given_call("older", 1, 25 * hour_s),
        given_call("e1", 1, 60, 1),
        given_call("named", 2, 60, 2, arm=None),
        given_call("measured", 1, 60, 3, arm=None, split="eval"),
        given_call("other", 1, 60, 4, policy="n"),
    ]
    await Ingester().store(engine, records)
    async with engine.connect() as connection:
        assert await episodes_per_hour(connection, "m") == 12 / 24
        assert await episodes_per_hour(connection, "nobody") == 0.0


def rows_touched(plan: dict[str, Any]) -> float:
    """Return how many rows the nodes of a plan gave or dropped as they joined, in all loops."""
    kept = ("Actual Rows", "Rows Removed by Join Filter", "Rows Removed by Filter")
    own = plan["Actual Loops"] * sum(plan.get(name, 0) for name in kept)
    return float(own + sum(map(rows_touched, plan.get("Plans", []))))


@pytest.mark.parametrize("known", ["", "ANALYZE"])
async def test_evidence_queries_touch_rows_in_proportion_to_their_episodes(
    engine: AsyncEngine, known: str
) -> None:
    """So it is before the database has looked at its tables, and after."""
    many, others = 300, 3000
    records: list[SpoolRecord] = []
    for number in range(many + others):
        # Those that are read began before nearly all others.
        began = 600.0 if number < many else 50.0
        records.append(given_call(f"e{number}", number % 2, began, number))
        records.append(reward(0.5, episode=f"e{number}"))
    asked: list[tuple[str, Any]] = []

    def note(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        asked.append((statement, parameters))

    await Ingester().store(engine, records)
    async with engine.begin() as connection:
        await connection.exec_driver_sql(known)
    event.listen(engine.sync_engine, "before_cursor_execute", note)
    assert len(await evidence(engine, [])) == many
    event.remove(engine.sync_engine, "before_cursor_execute", note)
    async with engine.connect() as connection:
        await connection.execute(text("SET LOCAL plan_cache_mode = force_custom_plan"))
        for statement, parameters in asked:
            explain = f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {statement}"
            [[plan]] = (await connection.exec_driver_sql(explain, parameters)).one()
            assert rows_touched(plan["Plan"]) < 200 * many, statement
