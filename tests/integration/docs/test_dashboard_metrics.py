"""The dashboard against a live scrape: what it asks a proxy for is what a proxy says."""

from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from store import __version__
from tests.integration.conftest import Proxy
from tests.support.waiting import awaited
from tests.unit.deploy.test_dashboards import TARGET_LABELS, Selector, dashboard_queries, selectors

# The trainer's metrics, once it trains, and the controller's; they are checked against their
# registries alone.
TRAINERS: Final = (
    *("pawl_update", "pawl_episodes_consumed", "pawl_trained_", "pawl_controller_"),
    *(
        "pawl_trainer_paused",
        "pawl_training_warning",
        "pawl_policy_left",
        "pawl_live_versions",
        "pawl_adapter_slots",
    ),
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
    asked = {
        selector
        for query in dashboard_queries()
        for selector in selectors(query.expression)
        if not selector.series.startswith((*TRAINERS, EXPLORING))
    }
    assert len({selector.series for selector in asked}) > 15

    async def missing() -> list[Selector]:
        found = await scrape(proxy)
        return [
            one
            for one in asked
            if one.series not in found or one.labels - TARGET_LABELS - found[one.series]
        ]

    # A call is counted once its reply has left.
    assert await awaited(missing, lambda missed: not missed) == []


async def test_version_with_traffic_begins_with_no_rewards(proxy: Proxy) -> None:
    assert {"policy", "version"} <= (await scrape(proxy)).get("pawl_reward_count", set())


async def test_a_reward_is_seen_by_the_version_that_earned_it(proxy: Proxy) -> None:
    await proxy.chat("/episode/e")
    await proxy.feedback({"episode": "e", "value": 1.0})
    async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    assert any(line.startswith('pawl_reward_count{policy="m",version="0"}') for line in lines)


async def test_scrape_says_which_version_runs(proxy: Proxy) -> None:
    async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    assert f'pawl_build_info{{version="{__version__}"}} 1.0' in lines
