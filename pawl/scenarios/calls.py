"""Count a run's calls at its end: how many there were, and how many are stored."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import aiohttp

from pawl.scenarios.counting import policy_facts, trainable_share
from pawl.scenarios.ledger import Ledger
from store.policy_table import PolicySpec

CALLS: Final = re.compile(r"^pawl_calls_total\{[^}]*\} (\S+)$", re.MULTILINE)
LOOK_S: Final = 0.5
STORED_S: Final = 30.0


async def named_calls(ledger: Ledger, replies: Sequence[str]) -> dict[str, Any]:
    """Return how many replies the agent got, and how many of these, by their ids, are stored."""
    stored = await _all(len(replies), lambda: ledger.stored(replies))
    return {"calls": len(replies), "recorded": stored}


async def all_calls(
    ledger: Ledger, metrics_url: str, specs: Sequence[PolicySpec]
) -> dict[str, Any] | None:
    """Return what became of all calls that the proxy answered, and of each policy's.

    Args:
        ledger: where they are stored.
        metrics_url: the proxy's metrics, which count them.
        specs: the policies.

    Returns:
        None if the database does not answer.
    """
    calls = await _answered(metrics_url)
    stored = await _all(calls, ledger.calls)
    counted = await ledger.by_policy()
    if counted is None:
        return None
    return {
        "calls": calls,
        "recorded": stored,
        "trainable_share": trainable_share(specs, counted),
        "failed_requests": sum(one.failed_calls for one in counted),
        "policies": policy_facts(specs, counted),
    }


async def _answered(metrics_url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(metrics_url) as reply:
        return int(sum(map(float, CALLS.findall(await reply.text()))))


async def _all(expected: int, count: Callable[[], Awaitable[int | None]]) -> int:
    """Wait until the ingester has stored so many; return how many are stored."""
    deadline = asyncio.get_running_loop().time() + STORED_S
    while True:
        stored = await count() or 0
        if stored >= expected or asyncio.get_running_loop().time() > deadline:
            return stored
        await asyncio.sleep(LOOK_S)
