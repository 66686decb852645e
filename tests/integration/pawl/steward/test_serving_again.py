"""What serves again after a roll-back is loaded before it does; what cannot be, does not serve."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.stack import free_port
from pawl.commands.policies import events_of
from pawl.commands.policy_traffic import promote_by_hand, roll_back_by_hand
from pawl.settings import StewardSettings
from pawl.steward.gate.trial import CELLS
from pawl.steward.gating import Gating
from pawl.steward.rollback import Loaded, load_again
from store.errors import NotGated, StateChanged
from store.version_queries import numbered_version
from store.version_states import roll_back
from tests.support.ledger.history import let_events_change
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.steward.replicas import publish, retire
from tests.support.steward.trials import RULE, command, live, pass_time, states
from trainer.publishing.adapters import SERVED
from trainer.publishing.model_server import Replicas

BAD = {0: "published", 1: "published", 2: "rolled_back"}
# What a lead of 0.6 over the base model, of which a promotion was sure, looks like.
SURE = [50.0] * (CELLS * 8 // 10) + [0.0] * (CELLS * 2 // 10)


@pytest.fixture
async def servers() -> AsyncIterator[tuple[FakeModelServer, FakeModelServer]]:
    async with fake_model_server() as one, fake_model_server() as other:
        yield one, other


async def fallen(engine: AsyncEngine, root: Path, *, retired: bool = True) -> None:
    """Version 2 was promoted for its lead, and has lost it; version 1 served before."""
    await publish(engine, root, 1, 2)
    if retired:
        await retire(engine, 1)
    evidence = json.dumps({"reference": {"logs": SURE}})
    rule = json.dumps(RULE.model_dump(mode="json"))
    async with engine.begin() as connection:
        gated = text("UPDATE policies SET gate = CAST(:rule AS jsonb) WHERE version = 2")
        await connection.execute(gated, {"rule": rule})
        kept = text("UPDATE policies SET share = :share WHERE version = 0")
        await connection.execute(kept, {"share": RULE.base_share})
        await let_events_change(connection)
        proven = "UPDATE policy_events SET evidence = CAST(:evidence AS jsonb) WHERE version = 2"
        proven += " AND to_state = 'serving'"
        await connection.execute(text(proven), {"evidence": evidence})
    await pass_time(engine)
    await live(engine, {("base", 0): [0.9, 1.0], ("serving", 2): [0.1, 0.0]})


async def look(database_url: str, engine: AsyncEngine, *urls: str) -> None:
    """Let one steward look at the policies once."""
    settings = StewardSettings.model_validate({"database_url": database_url})
    async with Replicas(urls) as replicas:
        await Gating(settings, 0.01, replicas).look(engine)


async def killed_before_it_loads(
    database_url: str, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A steward that has called version 1 back, and was killed then."""

    async def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("pawl.steward.gating.load_again", killed)
        with pytest.raises(KeyboardInterrupt):
            await look(database_url, engine, f"http://127.0.0.1:{free_port()}/v1")


async def told(engine: AsyncEngine, count: int) -> list[tuple[str, str]]:
    """The last changes of state, oldest first."""
    lines = await events_of(engine, "m")
    return [(line.version, line.to_state) for line in lines[-count:]]


async def test_a_retired_version_is_on_every_replica_before_it_serves_again(
    database_url: str,
    engine: AsyncEngine,
    servers: tuple[FakeModelServer, FakeModelServer],
    tmp_path: Path,
) -> None:
    await fallen(engine, tmp_path)
    at_load: list[str] = []

    async def note() -> None:
        at_load.append((await states(engine))[1])

    for server in servers:
        server.at_load = note
    await look(database_url, engine, *(server.url for server in servers))
    assert at_load == ["published", "published"]
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}
    assert [set(server.loaded) for server in servers] == [{"m@1"}, {"m@1"}]
    assert await told(engine, 3) == [
        ("m@1", "published"),
        ("m@2", "rolled_back"),
        ("m@1", "serving"),
    ]


async def test_a_replica_that_is_away_stops_no_roll_back(
    database_url: str,
    engine: AsyncEngine,
    servers: tuple[FakeModelServer, FakeModelServer],
    tmp_path: Path,
) -> None:
    await fallen(engine, tmp_path)
    away = f"http://127.0.0.1:{free_port()}/v1"
    await look(database_url, engine, away, servers[0].url)
    assert (await states(engine))[1] == "serving"
    assert set(servers[0].loaded) == {"m@1"}


async def test_what_a_replica_refuses_does_not_serve_but_the_base_does_and_the_event_says_why(
    database_url: str,
    engine: AsyncEngine,
    servers: tuple[FakeModelServer, FakeModelServer],
    tmp_path: Path,
) -> None:
    await fallen(engine, tmp_path)
    servers[1].refused = {"m@1"}
    await look(database_url, engine, *(server.url for server in servers))
    assert await states(engine) == {0: "serving", 1: "retired", 2: "rolled_back"}
    last = (await events_of(engine, "m"))[-1]
    assert (last.version, last.to_state, last.actor) == ("m@0", "serving", "steward")
    assert "m@2 was rolled back: less far above the base" in last.reason
    assert "m@1, which served before it, could not be loaded: the model server" in last.reason


async def test_altered_files_do_not_serve_again(
    database_url: str,
    engine: AsyncEngine,
    servers: tuple[FakeModelServer, FakeModelServer],
    tmp_path: Path,
) -> None:
    await fallen(engine, tmp_path)
    (tmp_path / "m" / "1" / SERVED[1]).write_text("altered")
    await look(database_url, engine, servers[0].url)
    assert (await states(engine))[0] == "serving"
    assert servers[0].tries["m@1"] == 0


async def test_if_no_replica_can_be_asked_what_is_loaded_serves_and_what_was_retired_does_not(
    database_url: str, engine: AsyncEngine, tmp_path: Path
) -> None:
    away = f"http://127.0.0.1:{free_port()}/v1"
    await fallen(engine, tmp_path)
    await look(database_url, engine, away)
    # It stays called back: the stewards load it, and an operator may promote it then.
    assert await states(engine) == {0: "serving", 1: "published", 2: "rolled_back"}


async def test_what_lost_the_traffic_lately_serves_again_also_if_no_replica_can_be_asked(
    database_url: str, engine: AsyncEngine, tmp_path: Path
) -> None:
    await fallen(engine, tmp_path, retired=False)
    await look(database_url, engine, f"http://127.0.0.1:{free_port()}/v1")
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}


async def test_what_lost_the_traffic_lately_and_is_refused_does_not_serve_and_keeps_its_episodes(
    database_url: str,
    engine: AsyncEngine,
    servers: tuple[FakeModelServer, FakeModelServer],
    tmp_path: Path,
) -> None:
    await fallen(engine, tmp_path, retired=False)
    servers[0].loaded["m@1"] = str(tmp_path / "m" / "1")
    servers[1].refuse_load = True
    await look(database_url, engine, *(server.url for server in servers))
    assert await states(engine) == {0: "serving", 1: "published", 2: "rolled_back"}


async def test_a_steward_killed_before_it_is_loaded_leaves_the_traffic_and_the_next_goes_on(
    database_url: str,
    engine: AsyncEngine,
    servers: tuple[FakeModelServer, FakeModelServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await fallen(engine, tmp_path)

    await killed_before_it_loads(database_url, engine, monkeypatch)
    assert await states(engine) == {0: "published", 1: "published", 2: "serving"}
    await look(database_url, engine, servers[0].url)
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}
    assert set(servers[0].loaded) == {"m@1"}


async def test_what_a_killed_steward_called_back_does_not_serve_unless_a_replica_has_loaded_it(
    database_url: str, engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fallen(engine, tmp_path)
    await killed_before_it_loads(database_url, engine, monkeypatch)
    assert await told(engine, 1) == [("m@1", "published")]
    await look(database_url, engine, f"http://127.0.0.1:{free_port()}/v1")
    assert await states(engine) == {0: "serving", 1: "published", 2: "rolled_back"}


async def test_what_a_killed_steward_called_back_and_a_replica_refuses_is_retired_again(
    database_url: str,
    engine: AsyncEngine,
    servers: tuple[FakeModelServer, FakeModelServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await fallen(engine, tmp_path)
    await killed_before_it_loads(database_url, engine, monkeypatch)
    servers[0].refused = {"m@1"}
    await look(database_url, engine, servers[0].url)
    assert await states(engine) == {0: "serving", 1: "retired", 2: "rolled_back"}


async def test_by_hand_what_was_called_back_before_serves_only_if_a_replica_has_loaded_it(
    database_url: str, engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fallen(engine, tmp_path)
    await killed_before_it_loads(database_url, engine, monkeypatch)
    async with Replicas([f"http://127.0.0.1:{free_port()}/v1"]) as replicas:
        _, serves, _ = await roll_back_by_hand(engine, replicas, "m", "it swears")
    assert serves is not None
    assert serves.version == 0


async def test_by_hand_it_is_loaded_first_too(
    engine: AsyncEngine, servers: tuple[FakeModelServer, FakeModelServer], tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, 2)
    await retire(engine, 1)
    async with Replicas([server.url for server in servers]) as replicas:
        chosen, serves, loaded = await roll_back_by_hand(engine, replicas, "m", "it swears")
    assert serves is not None
    assert (chosen.version, serves.version) == (2, 1)
    assert loaded is not None
    assert loaded.why_not is None
    assert [set(server.loaded) for server in servers] == [{"m@1"}, {"m@1"}]
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}


async def test_a_command_says_what_could_not_be_loaded(
    database_url: str,
    engine: AsyncEngine,
    servers: tuple[FakeModelServer, FakeModelServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await publish(engine, tmp_path, 1, 2)
    await retire(engine, 1)
    servers[0].refused = {"m@1"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("PAWL_UPSTREAM_URL", servers[0].url)
    done = await command("rollback", "m")
    assert done.stdout.startswith(
        "m@2 is rolled back\nm serves\nm@1 could not be loaded: the model server did not load m@1"
    )
    assert await states(engine) == {0: "serving", 1: "retired", 2: "rolled_back"}


async def test_an_operator_promotes_what_was_called_back_only_once_the_replicas_have_it(
    database_url: str,
    engine: AsyncEngine,
    servers: tuple[FakeModelServer, FakeModelServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A steward called version 1 back, found no replica to load it on, and let the base serve."""
    away = f"http://127.0.0.1:{free_port()}/v1"
    await fallen(engine, tmp_path)
    await look(database_url, engine, away)
    before = await states(engine)
    assert before == {0: "serving", 1: "published", 2: "rolled_back"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("PAWL_UPSTREAM_URL", away)
    refused = await command("promote", "m@1")
    assert isinstance(refused.exception, NotGated)
    assert "m@1 had been retired, and could not be loaded again" in str(refused.exception)
    assert "PAWL_UPSTREAM_URL" in str(refused.exception)
    assert await states(engine) == before
    monkeypatch.setenv("PAWL_UPSTREAM_URL", servers[0].url)
    assert (await command("promote", "m@1")).stdout == "m@1 serves\n"
    assert set(servers[0].loaded) == {"m@1"}
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}


async def test_what_was_retired_while_it_was_loaded_is_not_promoted(
    database_url: str,
    engine: AsyncEngine,
    servers: tuple[FakeModelServer, FakeModelServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await fallen(engine, tmp_path)
    await killed_before_it_loads(database_url, engine, monkeypatch)

    async def retired_meanwhile(*words: Any) -> Loaded:
        await retire(engine, 1)
        return await load_again(*words)

    monkeypatch.setattr("pawl.commands.policy_traffic.load_again", retired_meanwhile)
    async with Replicas([servers[0].url]) as replicas:
        with pytest.raises(StateChanged, match="not 'published' any more"):
            await promote_by_hand(engine, replicas, "m@1", "better than nothing")
    assert (await states(engine))[1] == "retired"


async def test_the_store_lets_nothing_serve_that_no_server_has(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, 2)
    await retire(engine, 1)
    async with engine.connect() as connection:
        serving = await numbered_version(connection, "m", 2)
        assert serving is not None
        with pytest.raises(StateChanged, match="m@1, which served before, is retired"):
            await roll_back(connection, serving, reason="worse", actor="operator")


async def test_a_policy_of_another_base_model_is_asked_of_no_server_of_this_one(
    engine: AsyncEngine, servers: tuple[FakeModelServer, FakeModelServer], tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, 2, policy="m", base="other-model")
    await retire(engine, 1)
    async with AsyncExitStack() as exits:
        replicas = await exits.enter_async_context(Replicas([servers[0].url]))
        _, serves, loaded = await roll_back_by_hand(engine, replicas, "m", "it swears")
    assert serves is not None
    assert serves.version == 0
    assert loaded is not None
    assert loaded.why_not == "no replica that answers serves its base model, other-model"
    assert not servers[0].tries
