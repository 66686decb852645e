"""Nothing is lost: a database that is away, a spool that is removed, a proxy that is killed."""

import asyncio
import os
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.feedback import KeyFiles
from proxy.policies.version_file import VersionFile, serving_versions
from proxy.spool.recorder import LONG_BYTES, Spool
from proxy.spool.segments import encode_frame
from store.database import make_engine
from store.embedded import EmbeddedPostgres
from store.ids import new_id
from store.keys import create_key
from tests.conftest import Psql, url_of
from tests.integration.conftest import Proxy, running, settings_for
from tests.integration.faults.conftest import Spooled
from tests.support.faults.counters import until_adds_up
from tests.support.records import captured
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import eventually, until


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


async def test_spool_of_a_killed_proxy_is_stored_at_the_next_start(
    database_url: str, upstream: FakeUpstream, spooled: Spooled
) -> None:
    spool = Spool(spooled.folder / "spool" / "0", segment_bytes=4096)
    frames = [encode_frame(captured(f"e{number}")) for number in range(30)]
    await asyncio.gather(*[spool.append(frame) for frame in frames])
    spool.close()
    async with running(settings_for(database_url, upstream.url, spooled.folder)):

        async def are_stored() -> bool:
            return await spooled.stored() == 30

        await eventually(are_stored)


async def test_segment_cut_at_any_byte_loses_only_the_cut_record(spooled: Spooled) -> None:
    """Every offset of the last record; each cut is a worker's folder of its own."""
    whole = encode_frame(captured("whole"))
    torn = encode_frame(captured("torn", request=b"{}", reply=b"{}"))
    for kept in range(len(torn)):
        folder = spooled.folder / str(kept)
        folder.mkdir()
        (folder / f"{new_id()}.open").write_bytes(whole + torn[:kept])
    moved = 0
    while found := await spooled.drainer.drain_once():
        moved += found
    assert moved == len(torn)
    assert not list(spooled.folder.glob("*/*.open"))
    # A cut at the record's own beginning leaves no trace of it.
    assert len(spooled.letters()) == len(torn) - 1
    assert await spooled.stored() == 1


async def test_group_commit_makes_many_records_durable_with_few_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_ordinary_record_does_not_wait_behind_several_long_records(tmp_path: Path) -> None:
    commits: list[list[str]] = []
    spool = Spool(
        tmp_path, segment_bytes=2**24, on_commit=lambda _outcome, marks: commits.append(marks)
    )
    long = [spool.append(bytes(LONG_BYTES + 1), f"long {which}") for which in range(3)]
    ordinary = [spool.append(encode_frame(captured()), f"ordinary {which}") for which in range(2)]
    assert all(await asyncio.gather(*long, *ordinary))
    assert commits == [["long 0", "ordinary 0", "ordinary 1"], ["long 1"], ["long 2"]]
    spool.close()


async def test_deleted_spool_is_made_again_with_its_version_file_and_later_records_are_stored(
    proxy: Proxy,
) -> None:
    assert (await proxy.chat()).status == 200
    await proxy.episodes(1)
    spool = proxy.settings.spool_dir
    shutil.rmtree(spool)
    assert (await proxy.chat()).status == 200
    status, _ = await proxy.feedback({"value": 1, "episode": "later"}, **{"Idempotency-Key": "k"})
    assert status == 202
    await proxy.episodes(2)
    await until(lambda: "m" in serving_versions(VersionFile(spool).read() or []))


async def test_api_key_is_still_required_after_the_spool_is_removed(
    proxy: Proxy, engine: AsyncEngine
) -> None:
    async with engine.begin() as connection:
        await create_key(connection, "agent", ("infer",))

    async def is_key_asked_for() -> bool:
        return (await proxy.chat()).status == 401

    await eventually(is_key_asked_for)
    for _ in range(3):
        shutil.rmtree(proxy.settings.spool_dir, ignore_errors=True)
        # Longer than a worker takes to see it.
        over = asyncio.get_running_loop().time() + 0.4
        while asyncio.get_running_loop().time() < over:
            assert (await proxy.chat()).status == 401


def test_disk_that_does_not_free_an_idempotency_key_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = KeyFiles(tmp_path)
    assert files.reserve("k", "a") is None

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "unlink", read_only)
    files.free("k")
