"""Two bodies under one Idempotency-Key: a conflict is told where it can be known, none is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.serving.supervisor import listening
from proxy.feedback.idempotency import KEEP_S, KeyFiles
from proxy.ingester.ingester import ingesting
from proxy.metrics import KEY_CONFLICTS
from proxy.spool.writer import SegmentWriter
from proxy.worker import serving
from store.errors import Refused
from store.records import FeedbackRecord
from store.write.feedback_keys import KeyState, forget_keys, give_key_back, take_key
from store.write.ingest import Ingester
from tests.integration.conftest import Proxy, settings_for
from tests.support.records import statement
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import eventually


@dataclass
class Place:
    """Where workers are started for one test."""

    exits: AsyncExitStack
    upstream: FakeUpstream
    engine: AsyncEngine
    database_url: str
    session: aiohttp.ClientSession

    async def worker(self, folder: Path, *, database: bool = True, ingester: bool = False) -> Proxy:
        """One on the spool in `folder`, which has a database or not."""
        url = self.database_url if database else None
        settings = settings_for(url, self.upstream.url, folder)
        if ingester:
            await self.exits.enter_async_context(ingesting(settings))
        [listener] = listening(settings.listen, 1)
        await self.exits.enter_async_context(serving(settings, listener))
        return Proxy(settings, self.engine, self.session)

    async def values(self) -> list[float]:
        """What is stored."""
        async with self.engine.connect() as connection:
            rows = await connection.execute(text("SELECT value FROM feedback ORDER BY value"))
            return list(rows.scalars())


@pytest.fixture
async def place(
    upstream: FakeUpstream, engine: AsyncEngine, database_url: str
) -> AsyncIterator[Place]:
    async with AsyncExitStack() as exits:
        session = await exits.enter_async_context(aiohttp.ClientSession())
        yield Place(exits, upstream, engine, database_url, session)


def feedback_record(
    value: float, *, key: str = "k", body_hash: str = "a", metric: str = "reward"
) -> FeedbackRecord:
    """One POST under a key."""
    record = statement(metric, value, key=key, episode="e")
    return msgspec.structs.replace(record, body_hash=body_hash)


def said(value: float) -> dict[str, Any]:
    return {"value": value, "episode": "e"}


async def both(one: Proxy, other: Proxy, values: tuple[float, float], key: str) -> list[Any]:
    """The answers to two bodies that are sent at the same time."""
    headers = {"Idempotency-Key": key}
    return await asyncio.gather(
        one.feedback(said(values[0]), **headers), other.feedback(said(values[1]), **headers)
    )


async def test_two_bodies_at_once_at_one_worker(place: Place, tmp_path: Path) -> None:
    worker = await place.worker(tmp_path, ingester=True)
    for number in range(5):
        answers = await both(worker, worker, (number, number + 0.5), uuid4().hex)
        assert sorted(status for status, _ in answers) == [202, 409]

    async def stored() -> bool:
        return len(await place.values()) == 5

    await eventually(stored)


async def test_a_repeat_at_the_same_time_has_the_same_answer(place: Place, tmp_path: Path) -> None:
    worker = await place.worker(tmp_path, ingester=True)
    [one, other] = await both(worker, worker, (1, 1), uuid4().hex)
    assert one == other
    assert one[0] == 202

    async def stored() -> bool:
        return await place.values() == [1.0]

    await eventually(stored)


async def test_two_workers_of_one_machine_without_a_database(place: Place, tmp_path: Path) -> None:
    one = await place.worker(tmp_path, database=False)
    other = await place.worker(tmp_path, database=False)
    key = uuid4().hex
    answers = await both(one, other, (1, 2), key)
    assert sorted(status for status, _ in answers) == [202, 409]
    taken = 1 if answers[0][0] == 202 else 2
    for worker in (one, other):
        headers = {"Idempotency-Key": key}
        assert (await worker.feedback(said(taken), **headers))[0] == 202
        assert (await worker.feedback(said(3 - taken), **headers))[0] == 409


@pytest.mark.usefixtures("_patient_lookups")
async def test_two_proxies_of_one_database(place: Place, tmp_path: Path) -> None:
    one = await place.worker(tmp_path / "one")
    other = await place.worker(tmp_path / "other")
    answers = await both(one, other, (1, 2), uuid4().hex)
    assert sorted(status for status, _ in answers) == [202, 409]


async def test_two_proxies_without_a_database_lose_nothing(place: Place, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    proxies = [await place.worker(folder, database=False) for folder in folders]
    key, before = uuid4().hex, KEY_CONFLICTS._value.get()
    answers = await both(proxies[0], proxies[1], (1, 2), key)
    assert [status for status, _ in answers] == [202, 202]
    assert (await proxies[1].feedback(said(2), **{"Idempotency-Key": key}))[0] == 202
    for folder in folders:
        # An ingester that has a database drains what the worker spooled without one.
        settings = settings_for(place.database_url, place.upstream.url, folder)
        await place.exits.enter_async_context(ingesting(settings))

    async def stored() -> bool:
        return await place.values() == [1.0, 2.0]

    async def counted() -> bool:
        # A conflict is counted once its batch is stored, so the row may be seen before it.
        return KEY_CONFLICTS._value.get() > before

    await eventually(stored)
    await eventually(counted)


@pytest.mark.usefixtures("_patient_lookups")
async def test_a_key_whose_body_was_not_taken_is_free_again(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await place.worker(tmp_path)
    headers = {"Idempotency-Key": uuid4().hex}
    with monkeypatch.context() as full:
        full.setattr(SegmentWriter, "append", lambda *_: False)
        assert (await worker.feedback(said(1), **headers))[0] == 507
    assert (await worker.feedback(said(2), **headers))[0] == 202
    assert (await worker.feedback(said(1), **headers))[0] == 409


async def test_the_ledger_keeps_both_bodies_in_any_order(engine: AsyncEngine) -> None:
    told: list[int] = []
    ingester = Ingester(lambda requests: told.append(len(requests)))
    one = feedback_record(1.0, key="k", body_hash="a")
    again = feedback_record(1.0, key="k", body_hash="a")
    other = feedback_record(2.0, key="k", body_hash="b")
    await ingester.store(engine, [one, again, other])
    await ingester.store(engine, [other, again])
    assert told == [1]
    async with engine.connect() as connection:
        rows = await connection.execute(text("SELECT value FROM feedback ORDER BY value"))
        assert list(rows.scalars()) == [1.0, 2.0]


async def test_keys_in_the_database(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        assert await take_key(connection, "k", "a") is KeyState.OWN
        assert await take_key(connection, "k", "a") is KeyState.OWN
        assert await take_key(connection, "k", "b") is KeyState.ANOTHERS
        await give_key_back(connection, "k", "b")
        assert await take_key(connection, "k", "b") is KeyState.ANOTHERS
        await give_key_back(connection, "k", "a")
        assert await take_key(connection, "k", "b") is KeyState.OWN
        await connection.execute(text("UPDATE feedback_keys SET at = now() - interval '25 hours'"))
        assert await forget_keys(connection) == 1
    await Ingester().store(engine, [feedback_record(1.0, key="k", body_hash="a")])
    async with engine.connect() as connection:
        assert await take_key(connection, "k", "a") is KeyState.STORED
        assert await take_key(connection, "k", "b") is KeyState.ANOTHERS


def test_keys_on_disk_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = KeyFiles(tmp_path)
    assert files.clean() == 0
    assert files.take("k", "a") is None
    assert files.take("k", "b") == "a"
    files.give_back("k")
    files.give_back("k")
    assert files.take("k", "b") is None
    assert files.clean() == 0
    later = (tmp_path / "keys").stat().st_mtime + KEEP_S + 60
    assert files.clean(later) == 1
    monkeypatch.setattr("proxy.feedback.idempotency.MOST", 2)
    for key in "abc":
        files.take(key, "x")
    assert files.clean() == 1


async def test_a_disk_that_keeps_no_key_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("in the way")
    assert KeyFiles(tmp_path).take("k", "a") is None


async def test_a_refusal_of_another_kind_is_told(engine: AsyncEngine) -> None:
    """What cannot be stored is still refused, and by that a dead letter."""
    with pytest.raises(Refused):
        await Ingester().store(engine, [feedback_record(1.0, metric="\x00")])
