"""Nothing is lost: a database that is away, a disk that is full, a record nobody can store."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import REGISTRY

from proxy.drain import Drainer
from proxy.segments import encode_frame
from proxy.spool import Spool
from store.embedded import EmbeddedPostgres
from store.engine import make_engine
from store.ids import new_id
from store.reading import episode_ids
from tests.conftest import psql, url_of
from tests.fake_upstream import FakeUpstream
from tests.integration.conftest import Proxy, eventually, running, settings_for
from tests.records import REPLY, captured, reward

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
    spool = Spool(tmp_path / "spool" / "0", segment_bytes=4096)
    frames = [encode_frame(captured(f"e{number}")) for number in range(30)]
    await asyncio.gather(*[spool.append(frame) for frame in frames])
    spool.close()
    engine = make_engine(database_url)
    async with running(settings_for(database_url, upstream.url, tmp_path)):

        async def stored() -> bool:
            async with engine.connect() as connection:
                return len(await episode_ids(connection)) == 30

        await eventually(stored)
    await engine.dispose()
    assert_adds_up()


async def test_a_segment_cut_at_any_byte_loses_only_what_was_cut(
    database_url: str, tmp_path: Path
) -> None:
    """Every offset of the last record; each cut is a worker's folder of its own."""
    whole = encode_frame(captured("whole"))
    torn = encode_frame(captured("torn"))
    for kept in range(len(torn)):
        folder = tmp_path / str(kept)
        folder.mkdir()
        (folder / f"{new_id()}.open").write_bytes(whole + torn[:kept])
    engine = make_engine(database_url)
    drainer = Drainer(tmp_path, lambda: engine, batch=10)
    moved = 0
    while found := await drainer.drain_once():
        moved += found
    assert moved == len(torn)
    assert not list(tmp_path.glob("*/*.open"))
    # A cut at the record's own beginning leaves no trace of it.
    assert len(list((tmp_path / "dead").glob("*.letter"))) == len(torn) - 1
    async with engine.connect() as connection:
        assert len(await episode_ids(connection)) == 1
    await engine.dispose()
    assert_adds_up()


async def test_one_record_that_cannot_be_stored_stops_no_other(
    database_url: str, tmp_path: Path
) -> None:
    engine = make_engine(database_url)
    spool = Spool(tmp_path / "0", segment_bytes=2**20)
    bad = captured("bad", reply=REPLY.replace(b'"r"', b'"nul\\u0000"'))
    for record in [captured("a"), captured("b"), bad, captured("c"), reward(1.0, episode="a")]:
        await spool.append(encode_frame(record))
    drainer = Drainer(tmp_path, lambda: engine, batch=10)
    assert await drainer.drain_once() == 5
    async with engine.connect() as connection:
        assert len(await episode_ids(connection)) == 3
    [reason] = (tmp_path / "dead").glob("*.reason")
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
    assert (await proxy.chat(headers={"x-pawl-episode": "gap"})).status == 200
    status, body = await proxy.feedback({"value": 1, "episode": "e"})
    assert status == 507
    assert "PAWL_SPOOL_DIR" in body["error"]["message"]
    monkeypatch.undo()
    assert_adds_up()
    assert (await proxy.chat()).status == 200
    assert (await proxy.counters())["pawl_records_dropped_total"] >= 2
    assert (await proxy.chat(headers={"x-pawl-episode": "gap"})).status == 200

    async def marked() -> bool:
        [*found] = await proxy.episodes(2)
        gap = next(episode for episode in found if episode.key == "gap")
        return "lost" in (gap.quarantined_reason or "")

    assert await eventually(marked)
    assert_adds_up()


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
    await asyncio.gather(*[spool.append(encode_frame(captured())) for _ in range(500)])
    assert syncs < 250
    spool.close()
