"""What is called back takes no slot that a model server has not: it is made room for first."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from pawl.commands.policies import events_of
from pawl.commands.policy_traffic import roll_back_by_hand
from pawl.settings import StewardSettings
from pawl.steward.gating import Gating
from store.adapter_slots import lock_slots
from store.write.ingest import ingest
from tests.integration.pawl.steward.test_serving_again import fallen, killed_before_it_loads
from tests.support.ledger.lineage import set_state
from tests.support.records import call
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.steward.replicas import publish
from tests.support.steward.trials import states
from trainer.publishing.model_server import ModelServer, Replicas


@pytest.fixture
async def server() -> AsyncIterator[FakeModelServer]:
    async with fake_model_server() as one:
        yield one


async def others(engine: AsyncEngine, root: Path) -> None:
    """Another policy of the base model, of which two versions are kept for their episodes."""
    await publish(engine, root, 1, 2, 3, policy="n")
    async with engine.begin() as connection:
        for number in (2, 1):
            made = call(f"of-{number}", policy="n", policy_version=number)
            await ingest(connection, [made])


async def of_others(engine: AsyncEngine) -> dict[int, str]:
    async with engine.connect() as connection:
        rows = await connection.execute(
            text("SELECT version, state FROM policies WHERE name = 'n'")
        )
        return {row.version: row.state for row in rows}


async def look(database_url: str, engine: AsyncEngine, url: str, slots: int | None) -> None:
    settings = StewardSettings.model_validate({"database_url": database_url})
    async with Replicas([url], slots) as replicas:
        await Gating(settings, 0.01, replicas).look(engine)


KEPT = {0: "published", 1: "published", 2: "published", 3: "serving"}


@pytest.mark.parametrize("is_configured", [False, True])
async def test_what_was_called_longest_ago_is_retired_before_the_load(
    database_url: str,
    engine: AsyncEngine,
    server: FakeModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_configured: bool,
) -> None:
    await others(engine, tmp_path)
    await fallen(engine, tmp_path)
    server.adapter_slots = 8 if is_configured else 4
    at_load: list[dict[int, str]] = []
    real = ModelServer.load

    async def load(self: ModelServer, name: str, folder: Path) -> None:
        at_load.append(await of_others(engine))
        await real(self, name, folder)

    monkeypatch.setattr(ModelServer, "load", load)
    await look(database_url, engine, server.url, 4 if is_configured else None)
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}
    # The one that was called first of the two, though it lost the traffic later.
    assert at_load == [KEPT | {2: "retired"}]
    assert await of_others(engine) == KEPT | {2: "retired"}
    told = [one for one in await events_of(engine, "n") if one.to_state == "retired"]
    assert [(one.version, one.actor) for one in told] == [("n@2", "steward")]
    assert "its slot is needed for m@1" in told[0].reason


async def test_where_there_is_room_nothing_is_retired(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await others(engine, tmp_path)
    await fallen(engine, tmp_path)
    server.adapter_slots = 5
    await look(database_url, engine, server.url, None)
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}
    assert await of_others(engine) == KEPT


async def test_where_what_serves_again_was_never_retired_nothing_is(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await others(engine, tmp_path)
    await fallen(engine, tmp_path, retired=False)
    server.adapter_slots = 3
    await look(database_url, engine, server.url, None)
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}
    assert await of_others(engine) == KEPT


async def test_where_all_slots_serve_it_serves_again_all_the_same(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, policy="n")
    await fallen(engine, tmp_path)
    server.adapter_slots = 2
    await look(database_url, engine, server.url, None)
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}
    assert await of_others(engine) == {0: "published", 1: "serving"}


async def test_room_is_made_once_though_a_steward_is_killed(
    database_url: str,
    engine: AsyncEngine,
    server: FakeModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await others(engine, tmp_path)
    await fallen(engine, tmp_path)
    server.adapter_slots = 4
    await killed_before_it_loads(database_url, engine, monkeypatch)
    for _ in range(2):
        await look(database_url, engine, server.url, None)
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}
    assert await of_others(engine) == KEPT | {2: "retired"}


async def test_an_operator_s_roll_back_makes_room_too(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await others(engine, tmp_path)
    await fallen(engine, tmp_path)
    server.adapter_slots = 4
    async with Replicas([server.url]) as replicas:
        await roll_back_by_hand(engine, replicas, "m", "it swears")
    assert await of_others(engine) == KEPT | {2: "retired"}
    told = [one for one in await events_of(engine, "n") if one.to_state == "retired"]
    assert [one.actor for one in told] == ["operator"]


async def test_what_was_called_back_for_another_policy_is_not_retired(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await others(engine, tmp_path)
    await fallen(engine, tmp_path)
    server.adapter_slots = 4
    # Called first of the two, and about to serve again.
    async with engine.begin() as connection:
        for state in ("retired", "published"):
            await set_state(connection, "n", 2, state, reason="for the test", actor="operator")
    await look(database_url, engine, server.url, None)
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}
    assert await of_others(engine) == KEPT | {1: "retired"}


async def test_a_trainer_that_is_stopped_while_it_counts_slots_keeps_nothing_from_serving_again(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await others(engine, tmp_path)
    await fallen(engine, tmp_path)
    server.adapter_slots = 4
    async with engine.begin() as connection:
        await lock_slots(connection, "n")
        with capture_logs() as logs:
            await look(database_url, engine, server.url, None)
    assert "no_room_made" in [one["event"] for one in logs]
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}
    assert await of_others(engine) == KEPT
