"""Two bodies under one Idempotency-Key: a known conflict is refused, and nothing is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.feedback import KEEP_KEYS_S, KeyFiles
from proxy.ingester.ingester import run_ingester
from proxy.metrics import KEY_CONFLICTS
from proxy.spool.writer import SegmentWriter
from tests.integration.conftest import Proxy, settings_for, working
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import awaited, until


@dataclass
class Workers:
    """Workers of one test."""

    exits: AsyncExitStack
    upstream: FakeUpstream
    engine: AsyncEngine
    database_url: str
    session: aiohttp.ClientSession

    async def start(self, folder: Path, *, database: bool = True) -> Proxy:
        """Start a worker on the spool in `folder`, which has a database or not."""
        url = self.database_url if database else None
        settings = settings_for(url, self.upstream.url, folder)
        await self.exits.enter_async_context(working(settings))
        return Proxy(settings, self.engine, self.session)

    async def stored(self, count: int) -> list[float]:
        """Return what is stored, once it is so many."""

        async def look() -> list[float]:
            async with self.engine.connect() as connection:
                rows = await connection.execute(text("SELECT value FROM feedback ORDER BY value"))
                return list(rows.scalars())

        return await awaited(look, lambda values: len(values) >= count)


@pytest.fixture
async def workers(
    upstream: FakeUpstream, engine: AsyncEngine, database_url: str
) -> AsyncIterator[Workers]:
    async with AsyncExitStack() as exits, aiohttp.ClientSession() as session:
        yield Workers(exits, upstream, engine, database_url, session)


def said(value: float) -> dict[str, Any]:
    return {"value": value, "episode": "e"}


async def both(one: Proxy, other: Proxy, values: tuple[float, float], key: str) -> list[Any]:
    """The answers to two bodies that are sent at the same time."""
    headers = {"Idempotency-Key": key}
    return await asyncio.gather(
        one.feedback(said(values[0]), **headers), other.feedback(said(values[1]), **headers)
    )


async def test_worker_refuses_the_second_of_two_simultaneous_bodies_of_an_idempotency_key(
    proxy: Proxy, workers: Workers
) -> None:
    for number in range(5):
        answers = await both(proxy, proxy, (number, number + 0.5), uuid4().hex)
        assert sorted(status for status, _ in answers) == [202, 409]
    # A repeat at the same time has the same answer.
    [one, other] = await both(proxy, proxy, (1, 1), uuid4().hex)
    assert one == other
    assert one[0] == 202
    assert len(await workers.stored(6)) == 6


async def test_workers_of_the_same_machine_share_idempotency_keys_without_a_database(
    workers: Workers, tmp_path: Path
) -> None:
    one, other = [await workers.start(tmp_path, database=False) for _ in range(2)]
    key = uuid4().hex
    answers = await both(one, other, (1, 2), key)
    assert sorted(status for status, _ in answers) == [202, 409]
    taken = 1 if answers[0][0] == 202 else 2
    for worker in (one, other):
        headers = {"Idempotency-Key": key}
        assert (await worker.feedback(said(taken), **headers))[0] == 202
        assert (await worker.feedback(said(3 - taken), **headers))[0] == 409


@pytest.mark.usefixtures("_patient_lookups")
async def test_proxies_of_the_same_database_share_idempotency_keys_of_stored_feedback(
    workers: Workers, tmp_path: Path
) -> None:
    one, other = [await workers.start(tmp_path / name) for name in ("one", "other")]
    headers = {"Idempotency-Key": uuid4().hex}
    assert (await one.feedback(said(1), **headers))[0] == 202
    await workers.exits.enter_async_context(run_ingester(one.settings))
    assert await workers.stored(1) == [1.0]
    for value, status in ((2, 409), (1, 202), (2, 409)):
        assert (await other.feedback(said(value), **headers))[0] == status


async def test_proxies_without_a_database_store_both_bodies_of_a_key_and_count_the_conflict(
    workers: Workers, tmp_path: Path
) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    one, other = [await workers.start(folder, database=False) for folder in folders]
    key, before = uuid4().hex, KEY_CONFLICTS._value.get()
    answers = await both(one, other, (1, 2), key)
    assert [status for status, _ in answers] == [202, 202]
    assert (await other.feedback(said(2), **{"Idempotency-Key": key}))[0] == 202
    for folder in folders:
        # An ingester that has a database drains what the worker spooled without one.
        settings = settings_for(workers.database_url, workers.upstream.url, folder)
        await workers.exits.enter_async_context(run_ingester(settings))
    assert await workers.stored(2) == [1.0, 2.0]
    # A conflict is counted once its batch is stored, so the row may be seen before it.
    await until(lambda: KEY_CONFLICTS._value.get() > before)


@pytest.mark.usefixtures("_patient_lookups")
async def test_idempotency_key_of_a_refused_body_is_free_again(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await workers.start(tmp_path)
    headers = {"Idempotency-Key": uuid4().hex}
    with monkeypatch.context() as full:
        full.setattr(SegmentWriter, "append", lambda *_: False)
        assert (await worker.feedback(said(1), **headers))[0] == 507
    assert (await worker.feedback(said(2), **headers))[0] == 202
    assert (await worker.feedback(said(1), **headers))[0] == 409


def test_idempotency_key_on_disk_is_forgotten_in_time_and_beyond_a_limit_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = KeyFiles(tmp_path)
    assert files.delete_old() == 0
    assert files.reserve("k", "a") is None
    assert files.reserve("k", "b") == "a"
    files.free("k")
    files.free("k")
    assert files.reserve("k", "b") is None
    assert files.delete_old() == 0
    later = (tmp_path / "keys").stat().st_mtime + KEEP_KEYS_S + 60
    assert files.delete_old(later) == 1
    monkeypatch.setattr("proxy.feedback.MAX_KEYS", 2)
    for key in "abc":
        files.reserve(key, "x")
    assert files.delete_old() == 1


async def test_feedback_is_accepted_if_the_disk_cannot_keep_its_idempotency_key(
    tmp_path: Path,
) -> None:
    (tmp_path / "keys").write_text("in the way")
    assert KeyFiles(tmp_path).reserve("k", "a") is None
