"""Nothing is lost: a database that is away, a disk that is full, a proxy that is killed."""

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from proxy.ingester.drain import Drainer
from proxy.spool.recorder import LONG_BYTES, Spool
from proxy.spool.segments import encode_frame
from store.database import make_engine
from store.embedded import EmbeddedPostgres
from store.ids import new_id
from store.read.episodes import episode_ids
from tests.conftest import Psql, url_of
from tests.integration.conftest import Proxy, running, settings_for
from tests.support.faults.counters import assert_adds_up, until_adds_up
from tests.support.records import captured
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import PATIENCE_S, eventually


async def test_calls_go_on_without_a_database_and_are_stored_when_it_comes(
    postgres: EmbeddedPostgres, psql: Psql, upstream: FakeUpstream, tmp_path: Path
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
        await until_adds_up()
        assert (await proxy.counters())["pawl_records_spooled"] >= 40
        psql("CREATE DATABASE comes_late")
        found = await eventually(lambda: _scored(proxy))
        assert len(found) == 20
        await until_adds_up()
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
    await until_adds_up()


async def test_what_a_full_disk_cut_off_hides_nothing_that_comes_later(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ingester reads whole frames of a commit that is then cut off again."""
    import os

    engine = make_engine(database_url)
    drainer = Drainer(tmp_path, lambda: engine, batch=10)
    spool = Spool(tmp_path / "0", segment_bytes=2**20)
    assert await spool.append(encode_frame(captured("first")))
    real = os.write
    half_written, read_by_ingester = threading.Event(), threading.Event()

    def half(handle: int, data: memoryview) -> int:
        if len(data) < 2 * len(encode_frame(captured("lost"))):
            half_written.set()
            read_by_ingester.wait(PATIENCE_S)
            raise OSError(28, "No space left on device")
        return real(handle, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    lost = asyncio.gather(*[spool.append(encode_frame(captured("lost"))) for _ in range(2)])
    assert await asyncio.to_thread(half_written.wait, PATIENCE_S)
    assert await drainer.drain_once() == 2
    read_by_ingester.set()
    assert await lost == [False, False]
    monkeypatch.undo()
    assert await spool.append(encode_frame(captured("later")))
    await drainer.drain_once()
    async with engine.connect() as connection:
        assert len(await episode_ids(connection)) == 3
    spool.close()
    await engine.dispose()


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


async def test_an_ordinary_record_does_not_wait_for_all_long_ones(tmp_path: Path) -> None:
    commits: list[list[str]] = []
    spool = Spool(
        tmp_path, segment_bytes=2**24, on_commit=lambda _outcome, marks: commits.append(marks)
    )
    long = [spool.append(bytes(LONG_BYTES + 1), f"long {which}") for which in range(3)]
    ordinary = [spool.append(encode_frame(captured()), f"ordinary {which}") for which in range(2)]
    assert all(await asyncio.gather(*long, *ordinary))
    assert commits == [["long 0", "ordinary 0", "ordinary 1"], ["long 1"], ["long 2"]]
    spool.close()
