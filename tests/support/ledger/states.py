"""Try versions as canaries, and hold the events that tell of states against the states."""

from itertools import pairwise

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.version_queries import list_events, list_versions, numbered_version
from store.version_states import begin_canary
from store.versions import PolicyState, PolicyVersion
from tests.support.ledger.lineage import load

TEST = "for the test"


async def states(engine: AsyncEngine) -> dict[int, PolicyState]:
    async with engine.connect() as connection:
        return {one.version: one.state for one in await list_versions(connection, "m")}


async def told(engine: AsyncEngine) -> dict[int, list[tuple[str | None, str]]]:
    """Return the changes of state that events tell of, oldest first, by version."""
    async with engine.connect() as connection:
        events = await list_events(connection, "m", most=10_000)
    found: dict[int, list[tuple[str | None, str]]] = {}
    for one in reversed(events):
        assert one.reason
        found.setdefault(one.version, []).append((one.from_state, one.to_state))
    return found


async def check_told(engine: AsyncEngine) -> None:
    """Check that each event begins where the last one ended, and the last ends where it is now."""
    now = await states(engine)
    for version, changes in (await told(engine)).items():
        assert changes[0][0] is None
        for (_, before), (after, _) in pairwise(changes):
            assert before == after
        assert changes[-1][1] == now[version]


async def version(connection: AsyncConnection, number: int) -> PolicyVersion:
    found = await numbered_version(connection, "m", number)
    assert found is not None
    return found


async def canary(
    connection: AsyncConnection, number: int, share: float = 0.1, control_share: float = 0.05
) -> PolicyVersion:
    """Let a written version be tried on a share of new episodes."""
    rule = {"mode": "canary", "control_share": control_share}
    await load(connection, "m", number, rule, reason=TEST, actor="trainer")
    loaded = await version(connection, number)
    await begin_canary(connection, loaded, share, reason=TEST, actor="controller")
    return await version(connection, number)
