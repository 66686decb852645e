"""The proxy as a process of its own: small, without torch, and quick to pass a chunk on."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from benchmarks.stack import free_port
from tests.conftest import ROOT
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import eventually

MIB = 2**20


@pytest.fixture
async def process(
    database_url: str, upstream: FakeUpstream, tmp_path: Path
) -> AsyncIterator[tuple[psutil.Process, str]]:
    """`pawl proxy`, as a user starts it."""
    port, admin = free_port(), free_port()
    # A user's project may have a package of that name, in the folder where Pawl is started.
    (tmp_path / "proxy").mkdir()
    (tmp_path / "proxy" / "__init__.py").write_text("raise ImportError('not Pawl's')\n")
    environment = {
        "PATH": os.environ["PATH"],
        "DATABASE_URL": database_url,
        "PAWL_UPSTREAM_URL": upstream.url,
        "PAWL_LISTEN": f"127.0.0.1:{port}",
        "PAWL_ADMIN_LISTEN": f"127.0.0.1:{admin}",
        "PAWL_SPOOL_DIR": str(tmp_path / "spool"),
    }
    started = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("pawl")), "proxy"),
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
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
