"""What a scrape of a proxy says beside what `test_prometheus.py` sees of a whole stack."""

from prometheus_client.parser import text_string_to_metric_families

from store import __version__
from tests.integration.conftest import Proxy


async def scrape(proxy: Proxy) -> dict[str, set[str]]:
    """Every series that the proxy exports now, with the labels that its samples have."""
    async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
        text = await reply.text()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def test_reward_count_metric_has_policy_and_version_before_any_reward(proxy: Proxy) -> None:
    assert {"policy", "version"} <= (await scrape(proxy)).get("pawl_reward_count", set())


async def test_reward_is_counted_for_the_policy_version_that_earned_it(proxy: Proxy) -> None:
    await proxy.chat("/episode/e")
    await proxy.feedback({"episode": "e", "value": 1.0})
    async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    assert any(line.startswith('pawl_reward_count{policy="m",version="0"}') for line in lines)


async def test_metrics_name_the_running_version_of_pawl(proxy: Proxy) -> None:
    async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    assert f'pawl_build_info{{version="{__version__}"}} 1.0' in lines
