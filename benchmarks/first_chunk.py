"""Measure how much later a stream's first chunk comes through Pawl than without it.

The same scripted upstream, asked directly and through `pawl proxy` in turn, one stream at a
time, recording durably. Delay: from the upstream's write to the client's read, in ms.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import psutil
from aiohttp import web
from rich.console import Console
from rich.table import Table

from pawl.stack.preflight import check_ports
from store.embedded.server import EmbeddedPostgres

BODY = {"model": "m", "messages": [{"role": "user", "content": "x" * 4000}], "stream": True}
CHUNK = (
    b'data: {"id":"r","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'
)
MIB = 2**20


class Upstream:
    """Write one chunk, note when, and end."""

    def __init__(self) -> None:
        self.written = 0.0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer chat completions, and a list of models that says vLLM."""
        if request.method == "GET":
            return web.json_response({"data": [{"id": "m", "owned_by": "vllm"}]})
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(0.005)
        self.written = time.perf_counter()
        await response.write(CHUNK)
        await asyncio.sleep(0.005)
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def running_proxy(folder: Path, upstream_port: int, port: int) -> AsyncIterator[int]:
    """Run `pawl proxy` on an embedded PostgreSQL, and yield its process id."""
    postgres = EmbeddedPostgres(folder)
    environment = dict(os.environ) | {
        "DATABASE_URL": postgres.ensure_running(),
        "PAWL_UPSTREAM_URL": f"http://127.0.0.1:{upstream_port}/v1",
        "PAWL_LISTEN": f"127.0.0.1:{port}",
        "PAWL_ADMIN_LISTEN": f"127.0.0.1:{port + 1}",
        "PAWL_SPOOL_DIR": str(folder / "spool"),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pawl.cli", "proxy"),
        env=environment,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await wait_ready(f"http://127.0.0.1:{port + 1}/readyz")
        yield process.pid
    finally:
        process.terminate()
        await process.wait()
        postgres.stop()


async def wait_ready(url: str) -> None:
    """Wait until the proxy answers, and has its database."""
    async with aiohttp.ClientSession() as session:
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(url) as response:
                    if (await response.json())["database"] == "up":
                        return
            await asyncio.sleep(0.1)


async def delay(session: aiohttp.ClientSession, url: str, upstream: Upstream) -> float:
    """Return the milliseconds from the upstream's write to our read of the first chunk."""
    async with session.post(f"{url}/v1/chat/completions", json=BODY) as response:
        await response.content.readany()
        arrived = time.perf_counter()
        await response.read()
    return (arrived - upstream.written) * 1000


async def measure(streams: int, port: int) -> dict[str, float]:
    """Measure direct and proxied in turn, so that a noisy moment hits both."""
    check_ports({"proxy": port, "proxy admin": port + 1})
    upstream = Upstream()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", upstream.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstream_port = runner.addresses[0][1]
    direct, proxied = [], []
    with tempfile.TemporaryDirectory() as folder:
        async with (
            running_proxy(Path(folder), upstream_port, port) as pid,
            aiohttp.ClientSession() as session,
        ):
            for _ in range(streams):
                direct.append(await delay(session, f"http://127.0.0.1:{upstream_port}", upstream))
                proxied.append(await delay(session, f"http://127.0.0.1:{port}", upstream))
            memory = psutil.Process(pid).memory_info().rss / MIB
    await runner.cleanup()
    direct_ms, proxied_ms = statistics.median(direct), statistics.median(proxied)
    return {
        "direct_ms": round(direct_ms, 3),
        "proxied_ms": round(proxied_ms, 3),
        "added_ms": round(proxied_ms - direct_ms, 3),
        "added_p95_ms": round(p95(proxied) - p95(direct), 3),
        "proxy_memory_mib": round(memory, 1),
    }


def p95(values: list[float]) -> float:
    """Return the 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--port", type=int, default=8190, help="of the proxy; admin is the next")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.streams, options.port))
    table = Table("figure", "median")
    for name, value in figures.items():
        table.add_row(name, f"{value:g}")
    Console().print(table)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
