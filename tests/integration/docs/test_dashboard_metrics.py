"""The dashboard against a live scrape: what it asks a proxy for is what a proxy says."""

from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pawl.judging.errors import Away
from store.judge.sentinels import remove_sentinels
from store.write.ingest import Ingester
from tests.integration.conftest import Proxy
from tests.support.ledger.sentinels import Mood, make_sentinels, score
from tests.support.records import call
from tests.support.waiting import awaited, eventually
from tests.unit.deploy.test_dashboards import Selector, dashboard_queries, selectors

# The trainer's metrics, once it trains, and the steward's; they are checked against their
# registries alone.
TRAINERS: Final = (
    *("pawl_update", "pawl_episodes_consumed", "pawl_trained_", "pawl_steward_"),
    *("pawl_trainer_held", "pawl_policy_left", "pawl_live_versions", "pawl_adapter_slots"),
    "pawl_next_version_seconds",
)
# What only a policy that explores makes; `test_exploring.py` looks at its samples.
EXPLORING: Final = "pawl_calls_explored"
STRICT: Final[dict[str, Any]] = {"name": "f", "strict": True, "parameters": {"type": "object"}}


async def scrape(proxy: Proxy) -> dict[str, set[str]]:
    """Every series that the proxy exports now, with the labels that its samples have."""
    async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
        text = await reply.text()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def not_in(found: dict[str, set[str]], asked: set[Selector]) -> dict[str, list[str]]:
    """The series that are asked for and are not there, or not with these labels."""
    return {
        series: sorted(labels)
        for series, labels in asked
        if series not in found or not labels <= found[series]
    }


async def work(proxy: Proxy) -> None:
    """One of everything: a call, feedback, a tool event, a refusal, something passed through."""
    await proxy.chat("/episode/e", {"x-pawl-tool-status": "not a ( list"})
    # A tool held to its schema by a grammar: a call that cannot carry loss.
    await proxy.chat("/episode/e", tools=[{"type": "function", "function": STRICT}])
    status, _ = await proxy.feedback([{"episode": "e", "value": 1.0}])
    assert status == 200
    await proxy.feedback({"metric": "tool_status", "value": "ok", "episode": "e", "id": "t"})
    await proxy.chat("/episode/evaluated/split/eval")
    await proxy.feedback([{"episode": "evaluated", "value": 1.0}])
    async with proxy.session.get(f"{proxy.url}/not/allowed") as refused:
        assert refused.status == 404
    async with proxy.session.get(f"{proxy.url}/v1/models") as passed:
        assert passed.status == 200


async def test_what_the_dashboard_asks_for_is_in_the_scrape(proxy: Proxy) -> None:
    await work(proxy)
    await make_sentinels(proxy.engine, [f"e-{one}" for one in range(16)], draws=1)
    await score(proxy.engine, Mood(), times=2)
    asked = {
        selector
        for query in dashboard_queries()
        for selector in selectors(query.expression)
        if not selector.series.startswith((*TRAINERS, EXPLORING))
    }
    assert len({selector.series for selector in asked}) > 15

    async def missing() -> dict[str, list[str]]:
        return not_in(await scrape(proxy), asked)

    # A call is counted once its reply has left.
    assert await awaited(missing, lambda names: not names) == {}


async def test_a_reward_is_seen_by_the_version_that_earned_it(proxy: Proxy) -> None:
    await proxy.chat("/episode/e")
    await proxy.feedback({"episode": "e", "value": 1.0})
    async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    assert any(line.startswith('pawl_reward_count{policy="m",version="0"}') for line in lines)


async def test_a_judge_that_drifts_is_seen_until_it_has_no_sentinels(proxy: Proxy) -> None:
    await make_sentinels(proxy.engine, [f"e-{one}" for one in range(12)])
    judge = Mood()
    await score(proxy.engine, judge, times=3)
    judge.mood = 0.3
    await score(proxy.engine, judge, times=2)
    labels = '{judge="mood",tenant="default"}'
    assert await eventually(lambda: says(proxy, f"pawl_judge_drifted{labels} 1.0"))
    assert await says(proxy, f"pawl_sentinels{labels} 12.0")
    async with proxy.engine.begin() as connection:
        await remove_sentinels(connection, "mood")
    assert await eventually(lambda: shows_not(proxy, 'judge="mood"'))
    # Of others nothing is known yet.
    await make_sentinels(proxy.engine, ["f-1"])
    assert await eventually(lambda: says(proxy, f"pawl_sentinels{labels} 1.0"))
    assert not await says(proxy, f"pawl_judge_drifted{labels} 1.0")


async def test_a_share_that_has_no_score_and_a_round_that_does_not_end_are_seen(
    proxy: Proxy,
) -> None:
    await make_sentinels(proxy.engine, ["e-1", "e-2", "e-3", "e-4"])
    judge = Mood()
    await Ingester().store(proxy.engine, [call(f"e-{one}") for one in (2, 3, 4)])
    judge.fails = {"e-1"}
    await score(proxy.engine, judge)
    labels = '{judge="mood",tenant="default"}'
    assert await eventually(lambda: says(proxy, f"pawl_sentinel_unscored_share{labels} 1.0"))
    judge.away_after = 0
    with pytest.raises(Away):
        await score(proxy.engine, judge)
    series = f"pawl_sentinel_unfinished_round_begun{labels}"
    assert await eventually(lambda: shows(proxy, series))
    judge.away_after = None
    await score(proxy.engine, judge)
    assert await eventually(lambda: shows_not(proxy, series))


async def shows_not(proxy: Proxy, series: str) -> bool:
    """Whether no line of a proxy's metrics has this."""
    return not await shows(proxy, series)


async def shows(proxy: Proxy, series: str) -> bool:
    """Whether a line of a proxy's metrics has this."""
    async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
        return series in await reply.text()


async def says(proxy: Proxy, line: str) -> bool:
    """Whether a proxy's metrics have this line."""
    async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
        return line in (await reply.text()).splitlines()
