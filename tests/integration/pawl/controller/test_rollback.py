"""What serves again after a roll-back is loaded before it does, in a slot that a server has."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from pawl.commands.policies import events_of
from pawl.commands.policy_traffic import promote_by_hand, roll_back_by_hand
from pawl.controller.gate.trial import CELLS
from pawl.controller.rollback import Loaded, load_again
from store.adapter_slots import lock_slots
from store.errors import NotGated, StateChanged
from store.version_queries import list_versions, numbered_version
from store.version_states import roll_back
from tests.integration.pawl.conftest import Pawl
from tests.support.controller.replicas import publish, retire
from tests.support.controller.trials import (
    AWAY,
    RULE,
    live,
    look,
    pass_time,
    states,
)
from tests.support.ledger.episodes import ingest
from tests.support.ledger.history import let_events_change
from tests.support.ledger.lineage import set_state
from tests.support.records import call
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from trainer.publishing.adapters import SERVED
from trainer.publishing.model_server import ModelServer, Replicas

# What a lead of 0.6 over the base model, of which a promotion was sure, looks like.
SURE = [50.0] * (CELLS * 8 // 10) + [0.0] * (CELLS * 2 // 10)
AGAIN = {0: "published", 1: "serving", 2: "rolled_back"}
BASE_KEPT = {0: "serving", 1: "published", 2: "rolled_back"}
BASE = {0: "serving", 1: "retired", 2: "rolled_back"}
Servers = tuple[FakeModelServer, FakeModelServer]


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    async with fake_model_server() as one, fake_model_server() as other:
        yield one, other


@pytest.fixture
async def server(servers: Servers) -> FakeModelServer:
    return servers[0]


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


async def killed_before_it_loads(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that has called version 1 back, and was killed then."""

    async def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("pawl.controller.gating.load_again", killed)
        with pytest.raises(KeyboardInterrupt):
            await look(engine, AWAY)
    assert await states(engine) == {0: "published", 1: "published", 2: "serving"}


@pytest.fixture
async def _retired(engine: AsyncEngine, tmp_path: Path) -> None:
    """Version 2 serves, and version 1, which served before, is on no server."""
    await publish(engine, tmp_path, 1, 2)
    await retire(engine, 1)


@pytest.fixture
async def _called_back(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller called version 1 back, and was killed."""
    await fallen(engine, tmp_path)
    await killed_before_it_loads(engine, monkeypatch)


async def test_retired_version_is_on_every_replica_before_it_serves_again(
    engine: AsyncEngine, servers: Servers, tmp_path: Path
) -> None:
    await fallen(engine, tmp_path)
    at_load: list[str] = []

    async def note() -> None:
        at_load.append((await states(engine))[1])

    for server in servers:
        server.at_load = note
    await look(engine, *(server.url for server in servers))
    assert at_load == ["published", "published"]
    assert await states(engine) == AGAIN
    assert [set(server.loaded) for server in servers] == [{"m@1"}, {"m@1"}]
    became = [(line.version, line.to_state) for line in await events_of(engine, "m")]
    assert became[-3:] == [("m@1", "published"), ("m@2", "rolled_back"), ("m@1", "serving")]


def nothing(servers: Servers, root: Path) -> None:
    """Change nothing."""


def one_refuses(servers: Servers, root: Path) -> None:
    servers[0].refused = {"m@1"}


def one_has_it_and_the_other_refuses(servers: Servers, root: Path) -> None:
    servers[0].loaded["m@1"] = str(root / "m" / "1")
    servers[1].refuse_load = True


def alters_the_files(servers: Servers, root: Path) -> None:
    (root / "m" / "1" / SERVED[1]).write_text("altered")


@pytest.mark.parametrize(
    ("was_retired", "was_killed", "happens", "asked", "after"),
    [
        pytest.param(True, False, nothing, 1, AGAIN, id="a-replica-away-stops-nothing"),
        pytest.param(True, False, one_refuses, 2, BASE, id="refused-does-not-serve"),
        pytest.param(True, False, alters_the_files, 1, BASE, id="altered-does-not-serve"),
        # It stays called back: the controllers load it, and an operator may promote it then.
        pytest.param(True, False, nothing, 0, BASE_KEPT, id="retired-and-nobody-to-ask"),
        pytest.param(False, False, nothing, 0, AGAIN, id="loaded-and-nobody-to-ask"),
        # It keeps its episodes.
        pytest.param(
            False,
            False,
            one_has_it_and_the_other_refuses,
            2,
            BASE_KEPT,
            id="loaded-and-refused-does-not-serve",
        ),
        pytest.param(True, True, nothing, 1, AGAIN, id="next-controller-goes-on-after-a-kill"),
        pytest.param(True, True, nothing, 0, BASE_KEPT, id="killed-and-nobody-to-ask"),
        pytest.param(True, True, one_refuses, 1, BASE, id="killed-and-refused-is-retired-again"),
    ],
)
async def test_version_serves_again_only_if_the_replicas_have_it(
    engine: AsyncEngine,
    servers: Servers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    was_retired: bool,
    was_killed: bool,
    happens: Callable[[Servers, Path], None],
    asked: int,
    after: dict[int, str],
) -> None:
    await fallen(engine, tmp_path, retired=was_retired)
    if was_killed:
        await killed_before_it_loads(engine, monkeypatch)
    happens(servers, tmp_path)
    await look(engine, AWAY, *(server.url for server in servers[:asked]))
    assert await states(engine) == after
    if happens is nothing:
        assert all(set(server.loaded) == {"m@1"} for server in servers[:asked])
    if happens is alters_the_files:
        assert not servers[0].tries
    if happens is one_refuses:
        last = (await events_of(engine, "m"))[-1]
        assert (last.version, last.to_state, last.actor) == ("m@0", "serving", "controller")
        assert "m@2 was rolled back: less far above the base" in last.reason
        assert "m@1, which served before it, could not be loaded: the model server" in last.reason


@pytest.mark.usefixtures("_called_back")
async def test_roll_back_by_hand_gives_no_traffic_to_what_no_replica_has_loaded(
    engine: AsyncEngine,
) -> None:
    async with Replicas([AWAY]) as replicas:
        await roll_back_by_hand(engine, replicas, "m", "it swears")
    assert (await states(engine))[0] == "serving"


@pytest.mark.usefixtures("_retired")
async def test_roll_back_by_hand_loads_first_too(engine: AsyncEngine, servers: Servers) -> None:
    async with Replicas([server.url for server in servers]) as replicas:
        chosen, serves, loaded = await roll_back_by_hand(engine, replicas, "m", "it swears")
    assert serves is not None
    assert (chosen.version, serves.version) == (2, 1)
    assert loaded is not None
    assert loaded.why_not is None
    assert [set(server.loaded) for server in servers] == [{"m@1"}, {"m@1"}]
    assert await states(engine) == AGAIN


@pytest.mark.usefixtures("_retired")
async def test_command_says_what_could_not_be_loaded(
    pawl: Pawl, engine: AsyncEngine, server: FakeModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.refused = {"m@1"}
    monkeypatch.setenv("PAWL_UPSTREAM_URL", server.url)
    done = await pawl("policies", "rollback", "m")
    assert done.stdout.startswith(
        "m@2 is rolled back\nm serves\nm@1 could not be loaded: the model server did not load m@1"
    )
    assert await states(engine) == BASE


async def test_operator_promotes_what_was_called_back_only_once_the_replicas_have_it(
    pawl: Pawl,
    engine: AsyncEngine,
    server: FakeModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A controller called version 1 back, found no replica to load it, and let the base serve."""
    await fallen(engine, tmp_path)
    await look(engine, AWAY)
    monkeypatch.setenv("PAWL_UPSTREAM_URL", AWAY)
    refused = await pawl("policies", "promote", "m@1")
    assert isinstance(refused.exception, NotGated)
    assert "m@1 had been retired, and could not be loaded again" in str(refused.exception)
    assert "PAWL_UPSTREAM_URL" in str(refused.exception)
    assert await states(engine) == BASE_KEPT
    monkeypatch.setenv("PAWL_UPSTREAM_URL", server.url)
    assert (await pawl("policies", "promote", "m@1")).stdout == "m@1 serves\n"
    assert set(server.loaded) == {"m@1"}
    assert await states(engine) == AGAIN


@pytest.mark.usefixtures("_called_back")
async def test_version_retired_while_it_was_loaded_is_not_promoted(
    engine: AsyncEngine, server: FakeModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def retired_meanwhile(*words: Any) -> Loaded:
        await retire(engine, 1)
        return await load_again(*words)

    monkeypatch.setattr("pawl.commands.policy_traffic.load_again", retired_meanwhile)
    async with Replicas([server.url]) as replicas:
        with pytest.raises(StateChanged, match="not 'published' any more"):
            await promote_by_hand(engine, replicas, "m@1", "better than nothing")
    assert (await states(engine))[1] == "retired"


@pytest.mark.usefixtures("_retired")
async def test_store_lets_nothing_serve_that_no_server_has(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        serving = await numbered_version(connection, "m", 2)
        assert serving is not None
        with pytest.raises(StateChanged, match="m@1, which served before, is retired"):
            await roll_back(connection, serving, reason="worse", actor="operator")


async def test_policy_of_another_base_model_is_asked_of_no_server_of_this_one(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, 2, policy="m", base="other-model")
    await retire(engine, 1)
    async with Replicas([server.url]) as replicas:
        _, serves, loaded = await roll_back_by_hand(engine, replicas, "m", "it swears")
    assert serves is not None
    assert serves.version == 0
    assert loaded is not None
    assert loaded.why_not == "no replica that answers serves its base model, other-model"
    assert not server.tries


# Slots: another policy of the base model, of which two versions are kept for their episodes.
KEPT = {0: "published", 1: "published", 2: "published", 3: "serving"}


async def others(engine: AsyncEngine, root: Path) -> None:
    await publish(engine, root, 1, 2, 3, policy="n")
    async with engine.begin() as connection:
        # The one that was called first of the two, though it lost the traffic later.
        for number in (2, 1):
            await ingest(connection, [call(f"of-{number}", policy="n", policy_version=number)])


async def of_others(engine: AsyncEngine) -> dict[int, str]:
    async with engine.connect() as connection:
        return {one.version: one.state for one in await list_versions(connection, "n")}


@pytest.mark.parametrize("is_configured", [False, True])
async def test_version_called_longest_ago_is_retired_before_the_load(
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

    async def load(self: ModelServer, *asked: Any) -> None:
        at_load.append(await of_others(engine))
        await real(self, *asked)

    monkeypatch.setattr(ModelServer, "load", load)
    await look(engine, server.url, slots=4 if is_configured else None)
    assert await states(engine) == AGAIN
    assert at_load == [KEPT | {2: "retired"}]
    assert await of_others(engine) == KEPT | {2: "retired"}
    [retired] = [one for one in await events_of(engine, "n") if one.to_state == "retired"]
    assert (retired.version, retired.actor) == ("n@2", "controller")
    assert "its slot is needed for m@1" in retired.reason


@pytest.mark.parametrize(
    ("slots", "happens", "after"),
    [
        pytest.param(5, "", KEPT, id="there-is-room"),
        pytest.param(3, "never retired", KEPT, id="it-was-never-retired"),
        pytest.param(4, "killed", KEPT | {2: "retired"}, id="once-though-a-controller-is-killed"),
        # Called first of the two, and about to serve again.
        pytest.param(4, "called back", KEPT | {1: "retired"}, id="not-what-was-called-back"),
        pytest.param(2, "all serve", {0: "published", 1: "serving"}, id="all-slots-serve"),
    ],
)
async def test_only_a_slot_that_is_needed_and_can_be_spared_is_taken(
    engine: AsyncEngine,
    server: FakeModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slots: int,
    happens: str,
    after: dict[int, str],
) -> None:
    if happens == "all serve":
        await publish(engine, tmp_path, 1, policy="n")
    else:
        await others(engine, tmp_path)
    await fallen(engine, tmp_path, retired=happens != "never retired")
    server.adapter_slots = slots
    if happens == "killed":
        await killed_before_it_loads(engine, monkeypatch)
    if happens == "called back":
        async with engine.begin() as connection:
            for state in ("retired", "published"):
                await set_state(connection, "n", 2, state)
    for _ in range(2):
        await look(engine, server.url)
    assert await states(engine) == AGAIN
    assert await of_others(engine) == after


async def test_roll_back_by_hand_makes_room_too(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await others(engine, tmp_path)
    await fallen(engine, tmp_path)
    server.adapter_slots = 4
    async with Replicas([server.url]) as replicas:
        await roll_back_by_hand(engine, replicas, "m", "it swears")
    assert await of_others(engine) == KEPT | {2: "retired"}
    [retired] = [one for one in await events_of(engine, "n") if one.to_state == "retired"]
    assert retired.actor == "operator"


async def test_trainer_stopped_while_it_counts_slots_keeps_nothing_from_serving_again(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await others(engine, tmp_path)
    await fallen(engine, tmp_path)
    server.adapter_slots = 4
    async with engine.begin() as connection:
        await lock_slots(connection, "n")
        with capture_logs() as logs:
            await look(engine, server.url)
    assert "no_room_made" in [one["event"] for one in logs]
    assert await states(engine) == AGAIN
    assert await of_others(engine) == KEPT
