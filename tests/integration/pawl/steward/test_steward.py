"""The steward: each replica has the adapters that the store lists, whatever happens to the rest."""

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import psutil
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.stack import free_port
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.steward.replicas import POLL_S, assert_has, publish, retire, server, stewarding
from tests.support.waiting import PATIENCE_S, eventually, until

__all__ = ["server"]


async def test_a_restarted_server_gets_its_adapters_back(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, 2, 3)
    await retire(engine, 1)
    async with stewarding(database_url, server.url):
        await assert_has(server, "m@2", "m@3")
        # What serves comes first.
        assert server.loads == ["m@3", "m@2"]
        assert server.loaded["m@3"] == str(tmp_path / "m" / "3")
        server.loaded.clear()
        await assert_has(server, "m@2", "m@3")
        await publish(engine, tmp_path, 4)
        await assert_has(server, "m@2", "m@3", "m@4")


async def test_only_policies_of_the_servers_base_model_are_loaded(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, policy="elsewhere", base="other-model")
    await publish(engine, tmp_path, 1, policy="writer", base="m")
    async with stewarding(database_url, server.url):
        await assert_has(server, "writer@1")
        # Nothing else is loaded at any later look.
        await asyncio.sleep(5 * POLL_S)
        assert server.loads == ["writer@1"]


async def test_a_replica_that_is_away_or_slow_delays_no_other(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1)
    port = free_port()
    async with fake_model_server() as slow:
        slow.slow_load = asyncio.Event()
        urls = (f"http://127.0.0.1:{port}/v1", slow.url, server.url)
        async with stewarding(database_url, *urls):
            await assert_has(server, "m@1")
            await publish(engine, tmp_path, 2)
            await assert_has(server, "m@1", "m@2")
            async with fake_model_server(port) as back:
                await assert_has(back, "m@1", "m@2")
            assert not slow.loaded
            slow.slow_load.set()
            await assert_has(slow, "m@1", "m@2")


async def test_several_stewards_at_once_load_each_adapter_once(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    server.slow_load = asyncio.Event()
    async with AsyncExitStack() as exits:
        await publish(engine, tmp_path, 1, 2)
        for _ in range(4):
            await exits.enter_async_context(stewarding(database_url, server.url))

        async def all_ask() -> bool:
            return server.tries.total() >= 4

        await eventually(all_ask)
        server.slow_load.set()
        await assert_has(server, "m@1", "m@2")
        # Nor is one loaded again at a later look.
        await asyncio.sleep(5 * POLL_S)
        assert sorted(server.loads) == ["m@1", "m@2"]


async def test_other_files_under_a_versions_name_are_replaced(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1)
    server.loaded = {"m@1": "/elsewhere", "by-hand": "/mine"}
    async with stewarding(database_url, server.url):

        async def right() -> bool:
            return server.loaded.get("m@1") == str(tmp_path / "m" / "1")

        await eventually(right)
        # What is not a version's name is nobody's business.
        assert server.loaded["by-hand"] == "/mine"


async def test_a_refused_adapter_is_tried_less_and_less_and_hinders_no_other(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, 2)
    server.refused = {"m@2"}
    async with stewarding(database_url, server.url):
        await assert_has(server, "m@1")
        # Ten looks at least, and it is not tried at each of them: again after 1, 2 and 4 s.
        await asyncio.sleep(10 * POLL_S)
        assert 1 <= server.tries["m@2"] <= 3
        server.refused = set()
        await assert_has(server, "m@1", "m@2")


async def test_what_was_known_is_loaded_while_the_database_is_away(
    database_url: str,
    engine: AsyncEngine,
    server: FakeModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await publish(engine, tmp_path, 1)
    async with stewarding(database_url, server.url):
        await assert_has(server, "m@1")

        refused = asyncio.Event()

        async def away(_: object) -> None:
            refused.set()
            raise ConnectionRefusedError

        with monkeypatch.context() as patched:
            patched.setattr("pawl.steward.replicas.list_servable", away)
            await refused.wait()
            server.loaded.clear()
            await assert_has(server, "m@1")
        await publish(engine, tmp_path, 2)
        await assert_has(server, "m@1", "m@2")


async def test_of_an_old_reading_only_what_served_is_loaded(
    database_url: str,
    engine: AsyncEngine,
    server: FakeModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files of others may be being deleted by a trainer that the database is there for."""
    await publish(engine, tmp_path, 1, 2)
    async with stewarding(database_url, server.url) as steward:
        await assert_has(server, "m@1", "m@2")

        async def away(_: object) -> None:
            raise ConnectionRefusedError

        monkeypatch.setattr("pawl.steward.replicas.OLDEST_S", 0.3)
        with monkeypatch.context() as patched:
            patched.setattr("pawl.steward.replicas.list_servable", away)
            [published] = [one for one in steward.servable.versions or [] if one.version == 1]
            await until(lambda: not steward.servable.may_load(published))
            server.loaded.clear()
            await assert_has(server, "m@2")
            # The other is loaded at no later look either.
            await asyncio.sleep(10 * POLL_S)
            assert set(server.loaded) == {"m@2"}
        await assert_has(server, "m@1", "m@2")


async def test_what_was_retired_meanwhile_is_not_loaded(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, 2)
    server.slow_load = asyncio.Event()
    async with stewarding(database_url, server.url) as steward:

        async def loading() -> bool:
            return bool(server.tries)

        await eventually(loading)
        await retire(engine, 1)

        async def seen() -> bool:
            return [one.version for one in steward.servable.versions or []] == [0, 2]

        await eventually(seen)
        server.slow_load.set()
        await assert_has(server, "m@2")
        # Nor is it loaded at a later look.
        await asyncio.sleep(5 * POLL_S)
        assert server.loads == ["m@2"]


async def test_the_process_is_small_answers_and_ends_at_sigterm(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1)
    port, away = free_port(), free_port()
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "pawl.cli", "steward"),
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", os.getcwd()),
            "DATABASE_URL": database_url,
            "PAWL_UPSTREAM_URL": server.url,
            "PAWL_REPLICA_URLS": f"http://127.0.0.1:{away}/v1",
            "PAWL_STEWARD_LISTEN": f"127.0.0.1:{port}",
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
            f'pawl_steward_replica_up{{replica="{server.url}"}} 1.0',
            f'pawl_steward_replica_up{{replica="http://127.0.0.1:{away}/v1"}} 0.0',
            f'pawl_steward_missing_adapters{{replica="{server.url}"}} 0.0',
            f'pawl_steward_loads_total{{outcome="loaded",replica="{server.url}"}} 1.0',
            "pawl_steward_database_up 1.0",
        } <= set(lines)

    await eventually(counted)
    started.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(started.wait(), PATIENCE_S) == 0
