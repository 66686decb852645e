"""Each replica has the adapters that the store lists, as they were trained, and no others."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from benchmarks.stack import free_port
from controller.reconciler import FIRST_PAUSE_S, SETTLED_LOOKS, Reconciler
from pawl.commands.policies import read_version_lines
from store import __version__
from store.version_queries import (
    idle_versions,
    list_servable,
    numbered_version,
    rollback_target,
)
from store.version_states import mark_unloaded, recall
from store.versions import PolicyVersion
from tests.support.controller.replicas import (
    POLL_S,
    RunningController,
    asked,
    assert_has,
    controlling,
    publish,
    unload,
)
from tests.support.faults.unreadable import unreadable
from tests.support.ledger.episodes import ingest
from tests.support.records import call
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.waiting import PATIENCE_S, awaited, eventually, until
from trainer.publishing.adapters import MANIFEST, SERVED_FILES
from trainer.publishing.model_server import Replicas
from trainer.publishing.probe import ProbeRow

# What version 1 was trained to say, and what a server says that has another base model.
TRAINED, OTHER = -2.0, -4.0
PROBE = (ProbeRow(ids=(1, 2, 3), logprobs=(TRAINED, TRAINED)),)


async def test_restarted_server_gets_its_adapters_back(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, 2, 3)
    await unload(engine, 1)
    async with controlling(engine, server.url):
        await assert_has(server, "m@2", "m@3")
        # What serves comes first.
        assert server.loads == ["m@3", "m@2"]
        assert server.loaded["m@3"] == str(tmp_path / "m" / "3")
        server.loaded.clear()
        await assert_has(server, "m@2", "m@3")
        await publish(engine, tmp_path, 4)
        await assert_has(server, "m@2", "m@3", "m@4")


async def test_model_server_that_has_all_its_adapters_is_seldom_asked(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, skip_look = 0, Reconciler.skip_look

    def counted(*given: Any) -> bool:
        nonlocal looks
        looks += 1
        return skip_look(*given)

    monkeypatch.setattr(Reconciler, "skip_look", counted)
    await publish(engine, tmp_path, 1)
    async with controlling(engine, server.url):
        await assert_has(server, "m@1")
        # The load itself may be under way still.
        await until(lambda: looks >= SETTLED_LOOKS)
        began, asked_before = looks, server.lists
        await until(lambda: looks >= began + 3 * SETTLED_LOOKS)
        assert server.lists - asked_before <= 4
        server.loaded.clear()
        await assert_has(server, "m@1")
        await publish(engine, tmp_path, 2)
        await assert_has(server, "m@1", "m@2")


async def test_no_check_of_a_server_is_skipped_after_a_change_or_while_versions_are_missing(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, 2)
    async with engine.connect() as connection:
        base, first, second = sorted(
            await list_servable(connection, "m"), key=attrgetter("version")
        )
    async with Replicas([server.url]) as replicas:
        reconciler = Reconciler(replicas.each[0])
        assert not reconciler.skip_look([base, first])
        await reconciler.look([base, first])
        assert not reconciler.skip_look([base, first, second])
        skipped = [reconciler.skip_look([base, first]) for _ in range(SETTLED_LOOKS)]
        assert skipped == [True] * (SETTLED_LOOKS - 1) + [False]
        server.refused = {"m@2"}
        await reconciler.look([base, first, second])
        assert not reconciler.skip_look([base, first, second])

        async def unserved() -> list[PolicyVersion]:
            return [first]

        await reconciler.look([base], unserved=unserved)
        # It was unloaded just now, and may be listed still.
        assert not reconciler.skip_look([base])
        await reconciler.look([base], unserved=unserved)
        assert reconciler.skip_look([base])


async def test_versions_that_no_episode_or_roll_back_needs_are_not_loaded_after_a_restart(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """The controller's, and then the model server's; until then they stay."""
    older = text("UPDATE policies SET changed_at = now() - interval '60 s'")
    await publish(engine, tmp_path, 1, 2, 3, 4)
    async with engine.begin() as connection:
        await connection.execute(older)
        await ingest(connection, [call("goes-on", policy_version=1)])
    port = free_port()
    async with controlling(engine, f"http://127.0.0.1:{port}/v1") as controller:
        async with fake_model_server(port) as server:
            # A roll-back would be to the version before the one that serves.
            await assert_has(server, "m@1", "m@3", "m@4")
            await publish(engine, tmp_path, 5)
            async with engine.begin() as connection:
                await connection.execute(older)
            await assert_has(server, "m@1", "m@3", "m@4", "m@5")
            assert sorted(server.loads) == ["m@1", "m@3", "m@4", "m@5"]
        await until(lambda: "m@3" not in {one.served_name for one in controller.servable.versions})
        async with fake_model_server(port) as server:
            await assert_has(server, "m@1", "m@4", "m@5")
            assert sorted(server.loads) == ["m@1", "m@4", "m@5"]


async def test_controller_unloads_unused_versions_without_a_trainer(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, 2, 3)
    await unload(engine, 1)
    await unload(engine, 2)
    async with engine.begin() as connection:
        long_ago = text("UPDATE policies SET changed_at = now() - interval '1 day'")
        await connection.execute(long_ago)
        # An episode went on with it until a moment ago: a proxy may still send it there.
        await ingest(connection, [call("ends", policy_version=2)])
    server.loaded.update({f"m@{number}": str(tmp_path / "m" / str(number)) for number in (1, 2, 3)})
    async with controlling(engine, server.url):
        await assert_has(server, "m@2", "m@3")


async def test_only_policies_of_the_servers_base_model_are_loaded(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, policy="elsewhere", base="other-model")
    await publish(engine, tmp_path, 1, policy="writer", base="m")
    async with controlling(engine, server.url):
        await assert_has(server, "writer@1")
        # Nothing else is loaded at any later look.
        await asyncio.sleep(5 * POLL_S)
        assert server.loads == ["writer@1"]


async def test_replica_that_is_away_or_slow_delays_no_other(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1)
    port = free_port()
    async with fake_model_server() as slow:
        slow.slow_load = asyncio.Event()
        urls = (f"http://127.0.0.1:{port}/v1", slow.url, server.url)
        async with controlling(engine, *urls):
            await assert_has(server, "m@1")
            await publish(engine, tmp_path, 2)
            await assert_has(server, "m@1", "m@2")
            async with fake_model_server(port) as back:
                await assert_has(back, "m@1", "m@2")
            assert not slow.loaded
            slow.slow_load.set()
            await assert_has(slow, "m@1", "m@2")


async def test_several_controllers_at_once_load_each_adapter_once(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    server.slow_load = asyncio.Event()
    async with AsyncExitStack() as exits:
        await publish(engine, tmp_path, 1, 2)
        for _ in range(4):
            await exits.enter_async_context(controlling(engine, server.url))
        await until(lambda: server.tries.total() >= 4)
        server.slow_load.set()
        await assert_has(server, "m@1", "m@2")
        # Nor is one loaded again at a later look.
        await asyncio.sleep(5 * POLL_S)
        assert sorted(server.loads) == ["m@1", "m@2"]


async def test_foreign_adapter_under_a_versions_name_is_replaced(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1)
    server.loaded = {"m@1": "/elsewhere", "by-hand": "/mine"}
    async with controlling(engine, server.url):
        await until(lambda: server.loaded.get("m@1") == str(tmp_path / "m" / "1"))
        # What is not a version's name is nobody's business.
        assert server.loaded["by-hand"] == "/mine"


@pytest.mark.parametrize("share", [0.05, None], ids=["control", "recalled"])
async def test_retired_version_that_no_replica_can_load_is_unloaded(
    engine: AsyncEngine,
    server: FakeModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    share: float | None,
) -> None:
    """So it keeps no share of new episodes, and no roll-back gives it the traffic."""
    monkeypatch.setattr("controller.reconciler.LONGEST_PAUSE_S", FIRST_PAUSE_S)
    await publish(engine, tmp_path, 1, 2)
    server.refused = {"m@1"}
    async with engine.begin() as connection:
        if share is None:
            await mark_unloaded(connection, "m", [1], "idle", "trainer", is_lost=True)
            await recall(connection, "m", 1, reason="wanted", actor="operator")
        values = {"share": share}
        await connection.execute(
            text("UPDATE policies SET share = :share WHERE version = 1"), values
        )

    async def is_unloaded() -> bool:
        async with engine.connect() as connection:
            lost = await numbered_version(connection, "m", 1)
            assert lost is not None
            target = await rollback_target(connection, "m")
        assert lost.state == "retired"
        return lost.unloaded and lost.share is None and target.version == 0

    async with controlling(engine, server.url):
        await eventually(is_unloaded)
        await assert_has(server, "m@2")


async def test_stopped_controller_leaves_no_database_connection_open(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading = asyncio.Event()

    async def long_reading(connection: AsyncConnection, *given: Any) -> list[PolicyVersion]:
        found = await idle_versions(connection, *given)
        is_reading.set()
        await asyncio.sleep(PATIENCE_S)
        return found

    monkeypatch.setattr("controller.replicas.idle_versions", long_reading)
    await publish(engine, tmp_path, 1)
    server.loaded["m@9"] = "nobody's"
    async with controlling(engine, server.url):
        await is_reading.wait()
    open_ones = text("SELECT count(*) - 1 FROM pg_stat_activity WHERE datname = current_database()")

    async def others() -> Any:
        async with engine.connect() as connection:
            return await connection.scalar(open_ones)

    assert await awaited(others, lambda count: count == 0) == 0


@pytest.mark.parametrize("at_fault", ["server", "replica that is away"])
async def test_version_is_not_given_up_while_servers_are_at_fault(
    engine: AsyncEngine,
    server: FakeModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_fault: str,
) -> None:
    """As with an empty mount point: what serves cannot be loaded there either."""
    monkeypatch.setattr("controller.reconciler.LONGEST_PAUSE_S", FIRST_PAUSE_S)
    await publish(engine, tmp_path, 1, 2)
    port, is_away = free_port(), at_fault != "server"
    urls = [server.url] + [f"http://127.0.0.1:{port}/v1"] * is_away
    server.refused = {"m@1"} if is_away else {"m@1", "m@2"}
    async with controlling(engine, *urls), AsyncExitStack() as exits:
        await until(lambda: server.tries["m@1"] >= 3)
        if is_away:
            await assert_has(await exits.enter_async_context(fake_model_server(port)), "m@1", "m@2")
        server.refused = set()
        await assert_has(server, "m@1", "m@2")
    [_, one, _] = await read_version_lines(engine, "m", None, "default")
    assert not one.unloaded


async def test_loading_of_a_recalled_version_is_retried_before_it_is_given_up_again(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.reconciler.LONGEST_PAUSE_S", 2 * FIRST_PAUSE_S)
    await publish(engine, tmp_path, 1)
    server.refused = {"m@1"}
    async with engine.connect() as connection:
        base, version = await list_servable(connection, "m")
    async with Replicas([server.url]) as replicas:
        reconciler = Reconciler(replicas.each[0])

        async def is_given_up() -> bool:
            await reconciler.look([base, version])
            return reconciler.has_given_up_on("m@1")

        await eventually(is_given_up)
        before = server.tries["m@1"]
        await reconciler.look([base])

        async def is_tried_again() -> bool:
            await reconciler.look([base, version])
            return server.tries["m@1"] > before

        await eventually(is_tried_again)
        assert not reconciler.has_given_up_on("m@1")


async def test_refused_adapter_is_retried_with_backoff_and_blocks_no_other(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, 2)
    server.refused = {"m@2"}
    async with controlling(engine, server.url):
        await assert_has(server, "m@1")
        # Ten looks at least, and it is not tried at each of them: again after 1, 2 and 4 s.
        await asyncio.sleep(10 * POLL_S)
        assert 1 <= server.tries["m@2"] <= 3
        server.refused = set()
        await assert_has(server, "m@1", "m@2")


@contextmanager
def database_away(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Event]:
    """Let readings fail; the event says that one has."""
    refused = asyncio.Event()

    async def away(_: object) -> None:
        refused.set()
        raise ConnectionRefusedError

    with monkeypatch.context() as patched:
        patched.setattr("controller.replicas.list_servable", away)
        yield refused


async def test_only_the_serving_version_is_loaded_while_the_list_of_versions_is_stale(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of others may be being deleted by a trainer that the database is there for."""
    await publish(engine, tmp_path, 1, 2)
    async with controlling(engine, server.url) as controller:
        await assert_has(server, "m@1", "m@2")
        monkeypatch.setattr("controller.replicas.OLDEST_S", 0.3)
        with database_away(monkeypatch):
            [published] = [one for one in controller.servable.versions or [] if one.version == 1]
            await until(lambda: not controller.servable.may_load(published))
            server.loaded.clear()
            await assert_has(server, "m@2")
            # The other is loaded at no later look either.
            await asyncio.sleep(10 * POLL_S)
            assert set(server.loaded) == {"m@2"}
        await assert_has(server, "m@1", "m@2")


async def test_version_unloaded_during_another_load_is_not_loaded(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, 2)
    server.slow_load = asyncio.Event()
    async with controlling(engine, server.url) as controller:
        await until(lambda: bool(server.tries))
        await unload(engine, 1)
        await until(lambda: [one.version for one in controller.servable.versions or []] == [0, 2])
        server.slow_load.set()
        await assert_has(server, "m@2")
        # Nor is it loaded at a later look.
        await asyncio.sleep(5 * POLL_S)
        assert server.loads == ["m@2"]


@contextmanager
def altered(path: Path) -> Iterator[None]:
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    yield
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("spoil", "name", "kind", "why"),
    [
        (altered, SERVED_FILES[1], "altered", "SHA-256"),
        (unreadable, SERVED_FILES[1], "unread", "cannot be read (Input/output error)"),
        (unreadable, MANIFEST, "unread", "cannot be read (Input/output error)"),
    ],
)
async def test_version_with_altered_or_unread_files_is_loaded_after_repair_and_blocks_no_other(
    engine: AsyncEngine,
    server: FakeModelServer,
    tmp_path: Path,
    spoil: Callable[[Path], AbstractContextManager[None]],
    name: str,
    kind: str,
    why: str,
) -> None:
    await publish(engine, tmp_path, 1, 2)
    with ExitStack() as spoilt:
        spoilt.enter_context(spoil(tmp_path / "m" / "2" / name))
        async with controlling(engine, server.url) as controller:
            # The one that serves comes first, and fails; the other is loaded at the same look.
            await assert_has(server, "m@1")
            await until(lambda: bool(controller.reasons(kind)))
            # Ten looks at least, and it is not tried at each of them: again after 1, 2 and 4 s.
            await asyncio.sleep(10 * POLL_S)
            assert set(server.loaded) == {"m@1"}
            assert server.tries["m@2"] == 0
            reasons = controller.reasons(kind)
            assert list(reasons) == ["m@2"]
            assert why in reasons["m@2"]
            async with asked(controller) as (ready, metrics):
                unfit = {"altered": {}, "unread": {}, kind: reasons}
                assert ready | unfit | {"status": "degraded"} == ready
                assert re.search(rf'outcome="{kind}",replica="{server.url}"}} [123]\.0', metrics)
                shown = 'pawl_controller_altered_adapters{version="m@2"} 1.0' in metrics
                assert shown is (kind == "altered")
            [_, one, two] = await read_version_lines(engine, "m", None, "default")
            assert (one.altered, one.unread) == (False, False)
            assert (two.altered, two.unread) == (kind == "altered", kind == "unread")
            spoilt.close()
            await assert_has(server, "m@1", "m@2")
            await until(lambda: not controller.reasons(kind))
            async with asked(controller) as (ready, metrics):
                assert ready | {"altered": {}, "unread": {}, "status": "ready"} == ready
                assert "pawl_controller_altered_adapters{" not in metrics


async def test_adapter_files_are_checked_at_each_load(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1)
    async with controlling(engine, server.url) as controller:
        await assert_has(server, "m@1")
        (tmp_path / "m" / "1" / SERVED_FILES[0]).write_text("other")
        server.loaded.clear()
        await until(lambda: "m@1" in controller.reasons("altered"))
        assert not server.loaded


async def why_misserved(controller: RunningController, server: FakeModelServer) -> str:
    """Why version 1 is not loaded on a server, once it is said."""
    await until(lambda: "m@1" in controller.reasons("misserved").get(server.url, {}))
    async with asked(controller) as (ready, metrics):
        assert ready["status"] == "degraded"
        assert f'misserved_adapters{{replica="{server.url}",version="m@1"}} 1.0' in metrics
        assert f'outcome="misserved",replica="{server.url}"' in metrics
        return str(ready["misserved"][server.url]["m@1"])


async def test_replica_restarted_with_another_base_is_refused_and_reported(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, probe=PROBE)
    server.logprobs["m@1"] = TRAINED
    async with fake_model_server() as other:
        other.logprobs["m@1"] = TRAINED
        async with controlling(engine, server.url, other.url) as controller:
            await assert_has(server, "m@1")
            await assert_has(other, "m@1")
            # It was restarted: it has lost its adapters, and has other weights.
            other.logprobs["m@1"] = OTHER
            other.loaded.clear()
            assert "differ from the trainer's by 2.0000 nats" in await why_misserved(
                controller, other
            )
            await assert_has(other)
            # The other replica keeps it, and it is not tried there at each look.
            await asyncio.sleep(10 * POLL_S)
            assert set(server.loaded) == {"m@1"}
            assert other.loads.count("m@1") <= 3
            # Once it serves the right model it has the version again, and nothing is told of it.
            other.logprobs["m@1"] = TRAINED
            await assert_has(other, "m@1")
            await until(lambda: not controller.reasons("misserved"))
            async with asked(controller) as (ready, metrics):
                assert (ready["status"], ready["misserved"]) == ("ready", {})
                assert "pawl_controller_misserved_adapters{" not in metrics


async def test_adapter_that_a_restarted_server_does_not_apply_is_refused(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    """It answers as its base model does, which the trained version is near to."""
    near = (ProbeRow(ids=(1, 2, 3), logprobs=(-1.01, -1.01)),)
    server.logprobs = {"m": -1.0, "m@1": -1.0}
    await publish(engine, tmp_path, 1, probe=near)
    async with controlling(engine, server.url) as controller:
        assert "it did not load the adapter" in await why_misserved(controller, server)
        await assert_has(server)


async def test_adapter_loaded_before_the_controller_started_is_probed_too(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    """Whoever loaded it may have been killed before it could ask what is served."""
    await publish(engine, tmp_path, 1, probe=PROBE)
    server.loaded = {"m@1": str(tmp_path / "m" / "1")}
    server.logprobs["m@1"] = OTHER
    async with controlling(engine, server.url) as controller:
        await why_misserved(controller, server)
        await assert_has(server)


async def test_adapter_is_unloaded_if_its_probe_is_refused(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, probe=PROBE)
    server.logprobs["m@1"] = TRAINED
    server.cannot_answer = {"m@1"}
    async with controlling(engine, server.url) as controller:
        assert "refused a probe of m@1" in await why_misserved(controller, server)
        await assert_has(server)
        server.cannot_answer = set()
        await assert_has(server, "m@1")


async def test_controller_process_takes_little_memory_reports_metrics_and_ends_at_sigterm(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1)
    port, away = free_port(), free_port()
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "pawl.cli", "controller"),
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", os.getcwd()),
            "DATABASE_URL": database_url,
            "PAWL_UPSTREAM_URL": server.url,
            "PAWL_REPLICA_URLS": f"http://127.0.0.1:{away}/v1",
            "PAWL_CONTROLLER_LISTEN": f"127.0.0.1:{port}",
        },
        stderr=asyncio.subprocess.DEVNULL,
    )
    await assert_has(server, "m@1")
    process = psutil.Process(started.pid)
    maps = {Path(one.path).name for one in process.memory_maps()}
    assert not [name for name in maps if "torch" in name]
    assert process.memory_info().rss < 200 * 2**20

    async def counted() -> bool:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/healthz") as reply:
                assert reply.status == 200
            async with session.get(f"http://127.0.0.1:{port}/metrics") as reply:
                lines = (await reply.text()).splitlines()
        return {
            f'pawl_controller_replica_up{{replica="{server.url}"}} 1.0',
            f'pawl_controller_replica_up{{replica="http://127.0.0.1:{away}/v1"}} 0.0',
            f'pawl_controller_missing_adapters{{replica="{server.url}"}} 0.0',
            f'pawl_controller_loads_total{{outcome="loaded",replica="{server.url}"}} 1.0',
            "pawl_controller_database_up 1.0",
            f'pawl_build_info{{version="{__version__}"}} 1.0',
        } <= set(lines)

    await eventually(counted)
    started.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(started.wait(), PATIENCE_S) == 0
