"""What a filter chooses, a part at a time; what is counted of it, and of the last days."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.claim_query import ClaimRule
from store.read import browsing, health
from store.read.browsing import EpisodeFilter, EpisodePage, browse, count_episodes, count_outcomes
from store.tenants import scoped
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import ago, call, reward

NOW = datetime.now(UTC)


@pytest.fixture
async def ledger(engine: AsyncEngine) -> AsyncEngine:
    """Six episodes of 6 to 1 hours ago, of two policies and two tenants."""
    greedy = {"trainable": False, "reason": "greedy"}
    said = {"request": '{"q":"naïve \\"café\\""}'.encode(), "reply": rb'{"a":"na\u00efve too"}'}
    acme = {"episode": scoped("acme", "f"), "task": scoped("acme", "t/1")}
    records = [
        call("a", **ago(6 * 3600), task="t/1"),
        call("a", **ago(5.9 * 3600), task="t/1", policy="other", policy_version=2),
        call("b", **ago(5 * 3600), task="t/1", agent="coder", policy_version=3),
        call("c", **ago(4 * 3600), task="t/2", agent="plan", **greedy),
        call("d", **ago(3 * 3600), **said),
        call("e", **ago(2 * 3600), task="eval/1", split="eval"),
        call(**ago(3600), **acme),
        call("g", **ago(1)),
    ]
    scores = [("a", 1.0), ("b", 0.25), ("c", -2.0), ("e", 0.5)]
    await Ingester().store(engine, [*records, *(reward(v, episode=e) for e, v in scores)])
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    rule = ClaimRule(policy="m", group_size=2, groups=1, max_age_s=1e9)
    claim = await claimed(engine, rule)
    assert claim is not None
    await consume_all(engine, claim, version=1)
    return engine


async def found(engine: AsyncEngine, tenant: str | None = None, **chosen: Any) -> str:
    """The names of the episodes, newest first, those of tenants without the tenant."""
    async with engine.connect() as connection:
        page = await browse(connection, EpisodeFilter(**chosen), tenant)
    assert page.goes_on_before is None
    return "".join(line.key[-1] for line in page.lines)


async def calls_of(connection: AsyncConnection, tenant: str | None) -> list[int]:
    """The newest calls of a tenant, by how they ended."""
    return [kind.calls for kind in await health.count_newest_calls(connection, NOW, tenant)]


async def fates(
    connection: AsyncConnection, tenant: str | None, since: datetime
) -> dict[tuple[str, str], int]:
    """Return the number of episodes by policy and state, summed over the reasons."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in (await count_outcomes(connection, tenant, since))[0]:
        if row.state is not None:
            counts[row.policy, row.state] += row.episodes
    return counts


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ({}, "gfedcbaa"),
        ({"policy": "other"}, "a"),
        ({"policy": "m", "version": 3}, "b"),
        ({"agent": "coder"}, "b"),
        ({"task": "t/1"}, "baa"),
        ({"split": "eval"}, "e"),
        ({"state": "trained"}, "ba"),
        ({"state": "scored"}, "eca"),
        ({"state": "open"}, "g"),
        ({"state": "unscored"}, "fd"),
        ({"reason": "greedy"}, "c"),
        ({"low": 0.25, "high": 0.5}, "eb"),
        ({"low": -5.0, "high": 0.0}, "c"),
        ({"since": NOW - timedelta(hours=4.5), "until": NOW - timedelta(hours=2.5)}, "dc"),
        ({"text": 'naïve "café"'}, "d"),
        ({"text": "naïve too"}, "d"),
        ({"text": "t/2"}, "c"),
        ({"text": "%"}, ""),
        ({"policy": "m", "state": "trained", "low": 0.5}, "a"),
    ],
)
async def test_filter_chooses_episodes_that_meet_all_its_conditions(
    ledger: AsyncEngine, chosen: dict[str, Any], names: str
) -> None:
    assert await found(ledger, **chosen) == names


async def test_tenant_sees_only_its_own_episodes(ledger: AsyncEngine) -> None:
    assert await found(ledger, "acme") == "f"
    assert await found(ledger, "acme", task="t/1") == "f"
    assert await found(ledger, "default") == "gedcbaa"
    assert await found(ledger, "default", task="t/1") == "baa"
    async with ledger.connect() as connection:
        counts = await count_episodes(connection, EpisodeFilter(), "acme")
        assert counts.states == {"unscored": 1}
        since = NOW - timedelta(days=1)
        assert await calls_of(connection, "acme") == [1]
        assert await fates(connection, "acme", since) == {("m", "unscored"): 1}


async def test_tenant_beside_a_busy_tenant_sees_its_own_newest_episodes(
    ledger: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browsing, "MOST_COUNTED", 1)
    monkeypatch.setattr(health, "MOST_CALLS", 1)
    since = NOW - timedelta(days=1)
    async with ledger.connect() as connection:
        assert await fates(connection, "acme", since) == {("m", "unscored"): 1}
        assert (await count_episodes(connection, EpisodeFilter(), "acme")).looked_at == 1
        assert await calls_of(connection, "acme") == [1]
        monkeypatch.setattr(health, "MOST_TENANT_EPISODES", 1)
        assert await calls_of(connection, "default") == [1]


async def test_reward_figures_leave_out_quarantined_episodes(
    ledger: AsyncEngine,
) -> None:
    async with ledger.begin() as connection:
        await connection.execute(
            text("UPDATE episodes SET quarantined_reason = 'lost' WHERE key = 'c'")
        )
        rows, _ = await count_outcomes(connection, None, NOW - timedelta(days=1))
    scored = [(row.scored, row.mean) for row in rows if (row.policy, row.split) == ("m", "train")]
    assert [one for one in scored if one[0]] == [(1, 1.0), (1, 0.25)]


async def test_pages_of_the_episode_list_have_each_episode_once(ledger: AsyncEngine) -> None:
    names, before = "", None
    async with ledger.connect() as connection:
        while True:
            page: EpisodePage = await browse(
                connection, EpisodeFilter(), None, before=before, most=2
            )
            # Of an episode all policies are shown, wherever the part ends.
            names += "".join(line.key[-1] for line in page.lines) + " "
            if page.goes_on_before is None:
                break
            assert page.is_full
            before = page.goes_on_before
    assert names == "gf ed cb aa "


async def test_episode_search_that_ran_out_of_time_can_be_continued(ledger: AsyncEngine) -> None:
    records = [call(f"n{number}", **ago(1800, number)) for number in range(300)]
    await Ingester().store(ledger, records)
    rare = EpisodeFilter(agent="plan")
    async with ledger.connect() as connection:
        page = await browse(connection, rare, None, within_s=0.0)
        assert (page.lines, page.is_full) == ([], False)
        while page.goes_on_before is not None:
            page = await browse(connection, rare, None, before=page.goes_on_before, within_s=0.0)
            if page.lines:
                break
    assert [line.key for line in page.lines] == ["c"]


async def test_episodes_are_counted_by_state_and_by_equal_ranges_of_rewards(
    ledger: AsyncEngine,
) -> None:
    async with ledger.connect() as connection:
        counts = await count_episodes(connection, EpisodeFilter(policy="m", low=0.9), None)
    assert counts.states == {"trained": 2, "scored": 2, "unscored": 2, "open": 1}
    assert (counts.low, counts.high, counts.looked_at) == (-2.0, 1.0, None)
    # Whatever range the filter has, so that another can be chosen.
    assert {n: bar for n, bar in enumerate(counts.bars) if bar} == {0: 1, 15: 1, 16: 1, 19: 1}


async def test_overview_counts_calls_rewards_and_states_of_episodes(
    ledger: AsyncEngine,
) -> None:
    since = datetime.now(UTC) - timedelta(days=1)
    async with ledger.connect() as connection:
        calls = await health.count_newest_calls(connection, NOW)
        rows, cut_at = await count_outcomes(connection, None, since)
        by_state = await fates(connection, None, since)
    reasons: Counter[str | None] = Counter()
    for kind in calls:
        reasons[kind.reason] += kind.calls
    assert reasons == {None: 7, "greedy": 1}
    means = {(row.policy, row.split, row.mean) for row in rows if row.scored}
    assert means == {
        *(("m", "train", value) for value in (1.0, 0.25, -2.0)),
        ("m", "eval", 0.5),
        ("other", "train", 1.0),
    }
    assert (by_state["m", "trained"], by_state["other", "scored"], cut_at) == (2, 1, None)
    parts = sorted(row.part for row in rows if row.part is not None)
    # A part is some nine minutes long, and the day began long before.
    assert abs(parts[0] - datetime.now(UTC) + timedelta(hours=6)) < timedelta(minutes=12)
