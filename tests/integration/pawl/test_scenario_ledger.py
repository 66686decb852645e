"""What a scenario counts at its end, of a real proxy's calls."""

from pawl.scenarios.calls import all_calls, named_calls
from pawl.scenarios.ledger import Ledger
from pawl.scenarios.progress import Progress
from store.policy_table import PolicySpec
from tests.integration.conftest import Proxy

SPECS = (PolicySpec(name="m", base="m"), PolicySpec(name="other", base="m"))


async def test_all_calls_of_the_proxy_are_counted_and_found(proxy: Proxy) -> None:
    replies = [await proxy.chat("/task/t/episode/e") for _ in range(3)]
    progress = Progress(title="A title", policy="m")
    ledger = Ledger(
        proxy.engine.url.render_as_string(hide_password=False), ["m", "other"], progress
    )
    try:
        found = await all_calls(ledger, f"{proxy.admin}/metrics", SPECS)
        assert found is not None
        assert (found["calls"], found["recorded"], found["failed_requests"]) == (3, 3, 0)
        assert set(found["policies"]) == {"m", "other"}
        ids = [reply.json["id"] for reply in replies]
        assert await named_calls(ledger, ids[:1]) == {"calls": 1, "recorded": 1}
        await ledger.look()
        assert progress.totals is not None
        assert progress.totals.calls == 3
        assert not ledger.trained(1)
    finally:
        await ledger.close()
