"""What tests of Pawl's commands share: `pawl` with a database, and a stand-in for the proxy."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pawl.cli import app
from tests.support.servers.fake_proxy import FakeProxy, fake_proxy

Pawl = Callable[..., Awaitable[Result]]


@pytest.fixture
def pawl(database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pawl:
    """Run `pawl` with the test's database, in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", database_url)

    async def run(*arguments: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, arguments)

    return run


@pytest.fixture
async def fake() -> AsyncIterator[FakeProxy]:
    async with fake_proxy() as server:
        yield server
