"""Serve a model that computes what it is asked, on a free port."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from benchmarks.chaos.trainer.server import Server


@asynccontextmanager
async def computing_server(base_name: str, model: str) -> AsyncIterator[str]:
    """Yield the URL, with `/v1`, of one that serves `model` as `base_name`, and its adapters."""
    runner = web.AppRunner(Server(base_name, Path(model)).app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
