"""A trainer publishes to model servers that do not see its folder."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from structlog.testing import capture_logs

from tests.support.servers.fetching import (
    Apart,
    TrainersPort,
    apart,
    fetching_for,
    trainers_port,
)
from tests.support.trainer.bench import Bench
from trainer.publishing.adapters import MANIFEST
from trainer.publishing.model_server import Replicas
from trainer.publishing.sources import UploadedFiles
from trainer.settings import TrainerSettings


@pytest.fixture
async def port(bench: Bench) -> AsyncIterator[TrainersPort]:
    async with trainers_port(bench.folder) as made:
        yield made


async def another(exits: AsyncExitStack, bench: Bench, source: str, disk: Path) -> Apart:
    """Start a second model server, with the log-probabilities of the first."""
    made = await exits.enter_async_context(apart(source, disk))
    made.server.logprobs = bench.fake.logprobs
    return made


async def test_version_is_tested_and_published_on_each_servers_own_disk(
    bench: Bench, port: TrainersPort, tmp_path: Path
) -> None:
    async with AsyncExitStack() as exits:
        disk = tmp_path / "apart"
        one = await exits.enter_async_context(fetching_for(bench.fake, port.source, disk / "a"))
        other = await another(exits, bench, port.source, disk / "b")
        async with bench.working(one.url, other.url) as loop:
            await loop.check_server()
            # Another adapter under the same name and path, as each self-test has.
            await loop.check_server()
            assert await loop.update_once()
        written = bench.folder / "m" / "1"
        assert one.has("m@1", written)
        assert other.has("m@1", written)
    assert await bench.states() == {0: "retired", 1: "serving"}


async def test_model_server_that_cannot_fetch_adapters_counts_as_away(
    bench: Bench, port: TrainersPort, tmp_path: Path
) -> None:
    async with AsyncExitStack() as exits:
        disk = tmp_path / "apart"
        one = await exits.enter_async_context(fetching_for(bench.fake, port.source, disk / "a"))
        other = await another(exits, bench, "http://127.0.0.1:9/adapters", disk / "b")
        async with bench.working(one.url, other.url) as loop:
            assert await loop.update_once()
        assert await bench.states() == {0: "retired", 1: "serving"}
        assert not other.server.tries
        # Where none can, nothing is rejected: it is published once one can.
        await bench.fill("later")
        port.is_away = True
        async with bench.working(one.url, other.url) as loop:
            with capture_logs() as logs:
                await loop.update_once()
        [why] = [line["reason"] for line in logs if line["event"] == "version_waits"]
        assert "503" in why
        assert (await bench.states())[2] == "written"
        port.is_away = False
        async with bench.working(one.url):
            assert (await bench.states())[2] == "serving"


async def test_version_is_uploaded_before_it_is_loaded_and_deleted_with_its_files(
    bench: Bench, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    source = f"file://{store}"
    async with AsyncExitStack() as exits:
        one = await exits.enter_async_context(fetching_for(bench.fake, source, tmp_path / "disk"))
        replicas = Replicas([one.url], files=UploadedFiles(source))
        loop = bench.loop(await exits.enter_async_context(replicas))
        await loop.check_server()
        assert not (store / "m" / "self-test").exists()
        assert await loop.update_once()
        assert one.has("m@1", store / "m" / "1")
        # A folder that no update recorded is left over once there is a newer version.
        for root in (store, bench.folder):
            shutil.copytree(root / "m" / "1", root / "m" / "2")
        await bench.fill("later")
        assert await loop.update_once()
    for root in (store, bench.folder):
        assert sorted(folder.name for folder in (root / "m").iterdir()) == ["1", "3"]


@pytest.mark.parametrize(("source", "status"), [("http://trainer/adapters", 200), (None, 404)])
async def test_trainers_port_serves_files_only_as_the_adapter_source(
    tmp_path: Path, source: str | None, status: int
) -> None:
    from trainer.run import port_app

    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / MANIFEST).write_text("{}")
    settings = TrainerSettings(adapter_dir=tmp_path, adapter_source=source)
    is_up, is_ready = asyncio.Event(), asyncio.Event()
    async with TestClient(TestServer(port_app(settings, is_up, is_ready))) as client:
        # While the model is loaded, too.
        assert (await client.get(f"/adapters/m/1/{MANIFEST}")).status == status
        assert (await client.get("/metrics")).status == 503
        is_up.set()
        assert "pawl_build_info" in await (await client.get("/metrics")).text()
        # The model servers are tested after that.
        assert (await client.get("/readyz")).status == 503
        is_ready.set()
        ready = await client.get("/readyz")
        assert (ready.status, await ready.json()) == (200, {})
