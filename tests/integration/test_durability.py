"""Nothing is lost: a database that is away, a disk that is full, a record nobody can store."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import REGISTRY

from proxy.app import running
from proxy.drain import Drainer
from proxy.segments import HEADER
from proxy.spool import Spool
from store.embedded import EmbeddedPostgres
from store.engine import make_engine
from store.migrate import upgrade
from store.reading import episode_ids
from tests.conftest import psql, url_of
from tests.fake_upstream import FakeUpstream
from tests.integration.conftest import Proxy, eventually, settings_for
from tests.records import call, reward

COUNTERS = ("", "_stored", "_dead_lettered", "_dropped")


def ledger() -> dict[str, float]:
    """The four outcomes and their sum, as `/metrics` has them."""
    names = {f"pawl_records{name}_total" for name in COUNTERS} | {"pawl_records_spooled"}
    return {name: REGISTRY.get_sample_value(name) or 0.0 for name in names}


def assert_adds_up() -> None:
    now = ledger()
    made = now.pop("pawl_records_total")
    assert made == sum(now.values())


async def test_calls_go_on_without_a_database_and_are_stored_when_it_comes(
    postgres: EmbeddedPostgres, upstream: FakeUpstream, tmp_path: Path
) -> None:
    url = url_of(postgres, "comes_late")
    async with AsyncExitStack() as exits:
        settings = settings_for(url, upstream.url, tmp_path)
        await exits.enter_async_context(running(settings))
        session = await exits.enter_async_context(aiohttp.ClientSession())
        engine = make_engine(url)
        proxy = Proxy(settings, engine, session)
        for number in range(20):
            headers = {"x-pawl-episode": f"e{number}"}
            assert (await proxy.chat(headers=headers)).status == 200
            assert (await proxy.feedback({"value": 1, "episode": f"e{number}"}))[0] == 200
        assert_adds_up()
        assert (await proxy.counters())["pawl_records_spooled"] >= 40
        psql(postgres, "CREATE DATABASE comes_late")
        found = await eventually(lambda: _scored(proxy))
        assert len(found) == 20
        assert_adds_up()
        await engine.dispose()


async def _scored(proxy: Proxy) -> object:
    try:
        found = await proxy.episodes(20)
    except Exception:
        return None
    return found if all(episode.feedback for episode in found) else None


async def test_a_spool_left_by_a_killed_proxy_is_stored_at_the_next_start(
    database_url: str, upstream: FakeUpstream, tmp_path: Path
) -> None:
    records = [call(f"e{number}") for number in range(30)]
    spool = Spool(tmp_path / "spool", segment_bytes=4096)
    await asyncio.gather(*[spool.append(record) for record in records])
    spool.close()
    engine = make_engine(database_url)
    async with running(settings_for(database_url, upstream.url, tmp_path)):

        async def stored() -> bool:
            async with engine.connect() as connection:
                return len(await episode_ids(connection)) == 30

        await eventually(stored)
    await engine.dispose()
    assert_adds_up()


@pytest.mark.parametrize("kept", range(1, 60, 7))
async def test_a_torn_end_is_set_aside_and_the_rest_stored(
    database_url: str, tmp_path: Path, kept: int
) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder, segment_bytes=2**20)
    await spool.append(call("whole"))
    await spool.append(call("torn"))
    spool.close()
    [segment] = folder.glob("*.seg")
    data = segment.read_bytes()
    length = HEADER.unpack_from(data)[0] + HEADER.size
    segment.write_bytes(data[: length + kept])
    await upgrade(database_url)
    engine = make_engine(database_url)
    spool = Spool(folder, segment_bytes=2**20)
    drainer = Drainer(spool, lambda: engine, batch=10)
    assert await drainer.drain_once() == 1
    assert await drainer.drain_once() == 0
    assert not list(folder.glob("*.seg"))
    assert len(list((folder / "dead").glob("*.letter"))) == 1
    spool.close()
    await engine.dispose()


async def test_one_record_that_cannot_be_stored_stops_no_other(
    database_url: str, tmp_path: Path
) -> None:
    engine = make_engine(database_url)
    spool = Spool(tmp_path / "spool", segment_bytes=2**20)
    bad = call("bad", response_id="nul\x00")
    for record in [call("a"), call("b"), bad, call("c"), reward(1.0, episode="a")]:
        await spool.append(record)
    drainer = Drainer(spool, lambda: engine, batch=10)
    assert await drainer.drain_once() == 5
    async with engine.connect() as connection:
        assert len(await episode_ids(connection)) == 3
    [reason] = (tmp_path / "spool" / "dead").glob("*.reason")
    assert "0x00" in reason.read_text()
    spool.close()
    await engine.dispose()


async def test_a_full_disk_drops_the_record_says_so_and_serves_on(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    def full(_fd: int, _data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert (await proxy.chat()).status == 200
    status, body = await proxy.feedback({"value": 1, "episode": "e"})
    assert status == 507
    assert "PAWL_SPOOL_DIR" in body["error"]["message"]
    monkeypatch.undo()
    assert_adds_up()
    assert (await proxy.chat()).status == 200
    assert (await proxy.counters())["pawl_records_dropped_total"] >= 2
    await proxy.only_call()


async def test_group_commit_makes_many_durable_with_few_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    syncs = 0
    real = os.fdatasync

    def counted(handle: int) -> None:
        nonlocal syncs
        syncs += 1
        real(handle)

    monkeypatch.setattr(os, "fdatasync", counted)
    spool = Spool(tmp_path, segment_bytes=2**24)
    await asyncio.gather(*[spool.append(call()) for _ in range(500)])
    spool.close()
    assert syncs < 250
