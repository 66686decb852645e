"""Model servers that share no folder load each version from their own disk, as it was written."""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.stack import free_port
from tests.support.controller.replicas import RunningController, assert_has, controlling, publish
from tests.support.servers.fake_server import FakeModelServer
from tests.support.servers.fetching import Apart, TrainersPort, apart, trainers_port
from tests.support.waiting import eventually, until
from trainer.errors import NotFetched, PublishError, UpstreamAway
from trainer.publishing.adapters import MANIFEST, SERVED_FILES, sha256_of, write_hashes
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.publishing.probe import ProbeRow
from trainer.publishing.sources import FetchedFiles
from trainer.settings import SourceSettings

WEIGHTS = SERVED_FILES[1]


def write(root: Path, weights: bytes = b"weights") -> Path:
    """Write the folder of version 1, with a manifest that has the hashes alone."""
    folder = root / "m" / "1"
    folder.mkdir(parents=True)
    (folder / SERVED_FILES[0]).write_text("{}")
    (folder / WEIGHTS).write_bytes(weights)
    write_hashes(folder)
    return folder


async def answers(server: ModelServer) -> bool:
    try:
        return bool(await server.models())
    except UpstreamAway:
        return False


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The trainer's folder, which nobody else sees."""
    return tmp_path / "trainer"


@pytest.fixture
async def port(root: Path) -> AsyncIterator[TrainersPort]:
    async with trainers_port(root) as made:
        yield made


@pytest.fixture
async def two(port: TrainersPort, tmp_path: Path) -> AsyncIterator[list[Apart]]:
    """Two model servers, each with a disk of its own."""
    async with AsyncExitStack() as exits:
        yield [
            await exits.enter_async_context(apart(port.source, tmp_path / name)) for name in "ab"
        ]


@asynccontextmanager
async def controller_of(
    engine: AsyncEngine, port: TrainersPort, folder: Path, *servers: Apart
) -> AsyncIterator[RunningController]:
    """Run a controller that sees the trainer's folder as little as the servers do."""
    files = FetchedFiles(SourceSettings(adapter_source=port.source, adapter_dir=folder))
    async with controlling(engine, *(server.url for server in servers), files=files) as controller:
        yield controller


async def test_each_model_server_loads_adapters_from_its_own_disk_and_reloads_after_a_loss(
    engine: AsyncEngine, two: list[Apart], port: TrainersPort, root: Path, tmp_path: Path
) -> None:
    probe = (ProbeRow(ids=(1, 2, 3), logprobs=(-2.0, -2.0)),)
    await publish(engine, root, 1, 2, probe=probe)
    for one in two:
        one.server.logprobs |= {"m@1": -2.0, "m@2": -2.0}
    async with controller_of(engine, port, tmp_path / "controller", *two):
        for one in two:
            await assert_has(one.server, "m@1", "m@2")
            assert one.has("m@1", root / "m" / "1")
            assert one.has("m@2", root / "m" / "2")
        # It comes back on a new machine.
        two[0].server.loaded.clear()
        shutil.rmtree(two[0].disk)
        await assert_has(two[0].server, "m@1", "m@2")
        assert two[0].has("m@2", root / "m" / "2")
        # What is loaded is known again by the trainer's path, and so not loaded twice.
        assert two[1].server.loads == ["m@2", "m@1"]


async def test_unreachable_adapter_source_is_reported_and_retried(
    engine: AsyncEngine, two: list[Apart], port: TrainersPort, root: Path, tmp_path: Path
) -> None:
    await publish(engine, root, 1)
    port.is_away = True
    async with controller_of(engine, port, tmp_path / "controller", *two) as controller:
        await until(lambda: bool(controller.reasons("unread")))
        assert "503" in controller.reasons("unread")["m@1"]
        assert not any(one.server.tries for one in two)
        port.is_away = False
        for one in two:
            await assert_has(one.server, "m@1")


async def test_model_server_loads_adapters_from_its_disk_while_the_trainer_is_away(
    engine: AsyncEngine, two: list[Apart], port: TrainersPort, root: Path, tmp_path: Path
) -> None:
    one = two[0]
    probe = (ProbeRow(ids=(1, 2, 3), logprobs=(-2.0, -2.0)),)
    await publish(engine, root, 1, probe=probe)
    one.server.logprobs["m@1"] = -2.0
    async with controller_of(engine, port, tmp_path / "controller", one):
        await assert_has(one.server, "m@1")
    port.is_away = True
    # It was restarted, and so was the controller, on another machine.
    one.server.loaded.clear()
    async with controller_of(engine, port, tmp_path / "other", one) as controller:
        await assert_has(one.server, "m@1")
        # Nobody knows yet whether it is served as it was trained.
        await until(lambda: bool(controller.reasons("unread")))
        port.is_away = False
        await until(lambda: not controller.reasons("unread"))
    assert one.server.loads == ["m@1", "m@1"]


async def test_failed_adapter_fetch_does_not_count_as_a_model_server_outage(
    two: list[Apart], port: TrainersPort, root: Path
) -> None:
    written = write(root)
    async with Replicas([one.url for one in two]) as servers:
        port.is_away = True
        with pytest.raises(NotFetched):
            await servers.ask(lambda server: server.load("m@1", written))
        port.is_away = False
        assert len(await servers.ask(lambda server: server.load("m@1", written))) == 2
        assert servers.return_count == 0


async def test_adapter_load_that_the_gateway_leaves_unanswered_counts_as_a_server_outage(
    two: list[Apart], root: Path
) -> None:
    written = write(root)

    async def hang_up() -> None:
        raise asyncio.CancelledError

    async with ModelServer(two[0].url) as server:
        two[0].server.at_load = hang_up
        with pytest.raises(UpstreamAway):
            await server.load("m@1", written)


async def test_altered_adapter_files_are_never_loaded_into_a_model_server(
    two: list[Apart], root: Path
) -> None:
    written = write(root)
    digest, right = sha256_of(written / MANIFEST), (written / WEIGHTS).read_bytes()
    (written / WEIGHTS).write_bytes(b"altered")
    async with ModelServer(two[0].url) as server:
        with pytest.raises(NotFetched, match="is not the file that was written"):
            await server.load("m@1", written, digest)
        assert not two[0].server.tries
        assert not list(two[0].disk.glob(f"*/*/{WEIGHTS}"))
        (written / WEIGHTS).write_bytes(right)
        # The files of a manifest of their own are not those that the database knows.
        with pytest.raises(NotFetched, match="is not the one that its update wrote"):
            await server.load("m@1", written, "0" * 64)
        assert not two[0].server.tries
        await server.load("m@1", written, digest)
    assert two[0].has("m@1", written)


async def test_adapter_gateway_passes_on_the_model_servers_answers(
    two: list[Apart], root: Path
) -> None:
    written, fake = write(root), two[0].server
    fake.refused = {"m@1"}
    fake.adapter_slots = 3
    async with ModelServer(two[0].url) as server:
        assert "3" in await server.metrics()
        with pytest.raises(PublishError, match=r"404.*No adapter found"):
            await server.load("m@1", written)
        fake.refused = set()
        await server.load("m@1", written)
        assert await server.base_of("m@1") == "m"
        assert await server.prompt_logprobs("m@1", [1, 2, 3]) == [-1.0, -1.0]
        await server.unload("m@1")
        assert set(await server.models()) == {"m"}
        fake.engine_is_dead = True
        with pytest.raises(UpstreamAway):
            await server.load("m@1", written)


@pytest.mark.parametrize(
    ("command", "source", "why"),
    [
        ("adapters", "", "PAWL_ADAPTER_SOURCE is not set"),
        ("adapters", "gs://bucket/adapters", "install gcsfs"),
        ("controller", "nosuch://bucket", "Protocol not known: nosuch"),
    ],
)
async def test_unusable_adapter_source_is_refused_at_the_start(
    tmp_path: Path, command: str, source: str, why: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "pawl.cli", *command.split()),
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", os.getcwd()),
            "PAWL_ADAPTER_SOURCE": source,
        },
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert why in said.decode()
    assert len(said.splitlines()) == 1


async def test_killed_adapter_gateway_resumes_its_download(
    server: FakeModelServer, root: Path, tmp_path: Path
) -> None:
    weights = os.urandom(9 * 2**20)
    written = write(root, weights)
    digest = sha256_of(written / MANIFEST)
    asked: list[int] = []
    stuck = asyncio.Event()

    async def send(request: web.Request) -> web.StreamResponse:
        """Stop answering as the second piece is asked for, until the process was killed."""
        if request.path.endswith(WEIGHTS) and request.method == "GET":
            asked.append(int(request.headers["Range"].removeprefix("bytes=").partition("-")[0]))
            if len(asked) == 2:
                stuck.set()
                await asyncio.Event().wait()
        return web.FileResponse(written / request.path.rpartition("/")[2])

    app = web.Application()
    app.router.add_get("/adapters/{rest:.*}", send)
    listen = f"127.0.0.1:{free_port()}"

    async def start(source: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "pawl.cli", "adapters"),
            cwd=tmp_path,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": os.environ.get("PYTHONPATH", os.getcwd()),
                "PAWL_UPSTREAM_URL": server.url,
                "PAWL_ADAPTER_SOURCE": source,
                "PAWL_ADAPTER_DIR": "disk",
                "PAWL_ADAPTERS_LISTEN": listen,
            },
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with ModelServer(f"http://{listen}/v1") as client:
            await eventually(lambda: answers(client))
        return process

    async with TestServer(app, shutdown_timeout=0.1) as source:
        url = str(source.make_url("/adapters"))
        killed = await start(url)
        async with ModelServer(f"http://{listen}/v1") as client:
            loading = asyncio.create_task(client.load("m@1", written, digest))
            await stuck.wait()
            killed.kill()
            await killed.wait()
            await asyncio.wait([loading])
            assert loading.exception() is not None
            assert not server.loaded
            again = await start(url)
            await client.load("m@1", written, digest)
        again.terminate()
        assert await again.wait() == 0
    assert asked == [0, 4 * 2**20, 4 * 2**20, 8 * 2**20]
    assert (tmp_path / "disk" / "m" / "1" / WEIGHTS).read_bytes() == weights
    assert server.loaded == {"m@1": str(tmp_path / "disk" / "m" / "1")}
