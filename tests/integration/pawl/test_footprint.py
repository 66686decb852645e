"""The proxy as a process of its own: small, without torch, and quick to pass a chunk on."""

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web

from proxy.outdated import NOTED, hashes
from tests.conftest import ROOT
from tests.integration.conftest import eventually, free_port
from tests.support.fake_upstream import FakeUpstream

MIB = 2**20


@pytest.fixture(params=["as it is installed", "from its sources"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where Pawl's packages are: compiled ones, or as they run without a C compiler."""
    return ROOT if request.param == "as it is installed" else uncompiled(tmp_path / "src")


def uncompiled(folder: Path) -> Path:
    """What `pawl proxy` is made of, without what was compiled."""
    ignored = shutil.ignore_patterns("*.so", NOTED, "__pycache__")
    for package in ("migrations", "pawl", "proxy", "store"):
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    return folder


@pytest.fixture
async def process(
    database_url: str, upstream: FakeUpstream, tmp_path: Path, root: Path
) -> AsyncIterator[tuple[psutil.Process, str]]:
    """`pawl proxy`, as a user starts it."""
    port, admin = free_port(), free_port()
    environment = {
        "PATH": os.environ["PATH"],
        "DATABASE_URL": database_url,
        "PAWL_UPSTREAM_URL": upstream.url,
        "PAWL_LISTEN": f"127.0.0.1:{port}",
        "PAWL_ADMIN_LISTEN": f"127.0.0.1:{admin}",
        "PAWL_SPOOL_DIR": str(tmp_path / "spool"),
    }
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pawl.cli", "proxy"),
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(root)},
        stderr=asyncio.subprocess.DEVNULL,
    )
    async with aiohttp.ClientSession() as session:

        async def ready() -> bool:
            try:
                async with session.get(f"http://127.0.0.1:{admin}/readyz") as response:
                    return (await response.json())["database"] == "up"
            except aiohttp.ClientError:
                return False

        await eventually(ready)
    yield psutil.Process(started.pid), f"http://127.0.0.1:{port}"
    started.terminate()
    assert await started.wait() == 0


async def test_memory_stays_small_and_torch_stays_out(
    process: tuple[psutil.Process, str], upstream: FakeUpstream
) -> None:
    proxy, url = process
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 4000}], "stream": True}
    async with aiohttp.ClientSession() as session:
        for _ in range(10):
            posts = [session.post(f"{url}/v1/chat/completions", json=body) for _ in range(50)]
            for response in await asyncio.gather(*posts):
                assert response.status == 200
                await response.read()
    assert proxy.memory_info().rss <= 120 * MIB
    maps = Path(f"/proc/{proxy.pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps


def test_it_does_not_start_where_its_sources_say_something_else(tmp_path: Path) -> None:
    root = uncompiled(tmp_path)
    (root / "proxy" / NOTED).write_text(json.dumps(hashes(root / "proxy")))
    with (root / "proxy" / "calls" / "handler.py").open("a") as source:
        source.write("# changed\n")
    command = [sys.executable, "-m", "pawl.cli", "proxy"]
    done = subprocess.run(command, cwd=root, env={}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    what = "changed after it was compiled: calls/handler.py. `make install` compiles it"
    assert what in done.stderr


async def test_a_first_chunk_is_passed_on_at_once(
    process: tuple[psutil.Process, str], upstream: FakeUpstream
) -> None:
    """Order, not speed: the figure itself is `python -m benchmarks.first_chunk`."""
    sent: list[float] = []

    async def timed(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent.append(time.perf_counter())
        await response.write(b'data: {"choices":[]}\n\n')
        await asyncio.sleep(0.05)
        await response.write(b"data: [DONE]\n\n")
        return response

    upstream.behave = timed
    _, url = process
    seen: list[float] = []
    async with aiohttp.ClientSession() as session:
        for _ in range(20):
            body = {"model": "m", "stream": True}
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                await response.content.readany()
                seen.append(time.perf_counter())
                await response.read()
    delays = [after - before for before, after in zip(sent, seen, strict=True)]
    assert statistics.median(delays) < 0.05
