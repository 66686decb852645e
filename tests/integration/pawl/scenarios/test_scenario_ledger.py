"""What a scenario counts at its end, of a real proxy's calls."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from pawl.scenarios.ledger import Ledger
from pawl.scenarios.progress import Progress
from store.policy_table import PolicySpec
from tests.support.faults.stand import Stand
from tests.support.servers.fake_upstream import fake_upstream
from tests.support.waiting import eventually

SPECS = (PolicySpec(name="m", base="m"), PolicySpec(name="other", base="m"))
CHAT = {"model": "m", "messages": [{"role": "user", "content": "q"}]}


@pytest.fixture
async def stand(tmp_path: Path, own_cluster: None) -> AsyncIterator[Stand]:
    """A proxy with processes of its own, whose metrics count its calls alone."""
    async with fake_upstream() as upstream:
        port = int(upstream.url.split(":")[2].split("/")[0])
        found = await asyncio.to_thread(Stand, tmp_path, port, 1)
        try:
            await found.ready()
            yield found
        finally:
            await asyncio.to_thread(found.stop)
            await asyncio.to_thread(found.postgres.stop)


async def ask(stand: Stand) -> None:
    url = f"http://127.0.0.1:{stand.port}/task/t/episode/e/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=CHAT) as reply:
        assert reply.status == 200


async def test_all_calls_of_the_proxy_are_counted_and_found(stand: Stand) -> None:
    for _ in range(3):
        await ask(stand)
    progress = Progress(title="A title", policy="m")
    ledger = Ledger(stand.url, ["m", "other"], progress)
    try:
        page = f"http://127.0.0.1:{stand.admin}/metrics"

        async def counted() -> bool:
            # A call is counted a moment after its reply has ended.
            found = await ledger.calls(page, SPECS)
            return found is not None and found["calls"] == 3

        await eventually(counted)
        found = await ledger.calls(page, SPECS)
        assert found is not None
        assert (found["calls"], found["recorded"], found["failed_requests"]) == (3, 3, 0)
        assert set(found["policies"]) == {"m", "other"}
        await ledger.look()
        assert progress.totals is not None
        assert progress.totals.calls == 3
        assert not ledger.trained(1)
    finally:
        await ledger.close()
