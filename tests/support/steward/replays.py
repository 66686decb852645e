"""What tests of replays share: recorded calls, a candidate, and stewards that look."""

from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.steward.gating import Gating
from store.version_queries import list_events
from store.versions import PolicyEvent
from store.write.ingest import ingest
from tests.support.records import ago, call, tokens
from tests.support.steward import trials
from tests.support.steward.trials import RULE, gating
from trainer.publishing.model_server import Replicas

REPLAYED = RULE.model_copy(
    update={"replay_states": 6, "replay_tokens": 8, "most_kl_to_serving": 0.5}
)
# How long ago the recorded calls were made: before any candidate.
MADE_S = 3600.0


async def recorded(
    engine: AsyncEngine,
    held_out: int = 4,
    others: int = 4,
    *,
    run: str = "",
    ago_s: float = MADE_S,
    **changes: Any,
) -> None:
    """Calls of the policy, some of evaluation: the prompt of each begins with its number from 2."""
    made = [("eval", f"{run}e{number}") for number in range(held_out)]
    made += [("train", f"{run}t{number}") for number in range(others)]
    calls = []
    for place, (split, key) in enumerate(made):
        own = {"split": split, "tokens": tokens([2 + place, 3, 4], [5, 6])}
        calls.append(call(key, **{**own, **ago(ago_s, place), **changes}))
    async with engine.begin() as connection:
        await ingest(connection, calls)


async def candidate(engine: AsyncEngine, name: str = "m", **rule: Any) -> None:
    """Version 1 of a policy, whose rule has a replay, waits for its trial."""
    await trials.candidate(engine, 0, rule=REPLAYED.model_copy(update=rule), name=name)


async def loaded(adapter: Path, *urls: str) -> None:
    """Every replica has loaded version 1."""
    async with Replicas(urls) as replicas:
        await replicas.load("m@1", adapter)


async def rounds(judge: Gating, engine: AsyncEngine, times: int = 5) -> None:
    """Let a steward look, and go on with replays, so often."""
    for _ in range(times):
        await judge.look(engine)
        await judge.replays.go_on(engine)


async def look(database_url: str, engine: AsyncEngine, *urls: str, times: int = 5) -> None:
    """Let a new steward look at the policies so often."""
    async with Replicas(urls) as replicas:
        await rounds(gating(database_url, replicas), engine, times)


async def events_of(engine: AsyncEngine, version: int = 1) -> list[PolicyEvent]:
    """What became of a version, the newest first."""
    async with engine.connect() as connection:
        return await list_events(connection, "m", version)


async def last_event(engine: AsyncEngine, version: int = 1) -> PolicyEvent:
    return (await events_of(engine, version))[0]


async def replay_of(engine: AsyncEngine, version: int = 1) -> dict[str, Any]:
    """What a version's last event rests on."""
    evidence = (await last_event(engine, version)).evidence
    assert evidence is not None
    found: dict[str, Any] = evidence["replay"]
    return found
