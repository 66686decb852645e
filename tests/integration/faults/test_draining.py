"""The drain stores each record once, many at a time, and goes on where an ingester ended."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.ingester import drain, segment_reader
from proxy.ingester.drain import Drainer
from proxy.spool.recorder import Spool
from proxy.spool.segments import encode_frame, frame_of
from store.database import make_engine
from store.read.episodes import episode_ids
from tests.support.faults.counters import assert_adds_up, ledger
from tests.support.records import captured, reward, statement
from tests.support.waiting import eventually, until

# A whole frame that is none of ours.
FOREIGN = frame_of(b"\x93\x01\x02")


async def test_records_that_come_one_by_one_are_stored_many_at_once(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(database_url)
    spool = Spool(tmp_path / "0", segment_bytes=2**20)
    drainer = Drainer(tmp_path, lambda: engine, batch=500)
    batches: list[int | None] = []
    drain_once = drainer.drain_once

    async def counted() -> int | None:
        batches.append(await drain_once())
        return batches[-1]

    monkeypatch.setattr(drainer, "drain_once", counted)
    running_drain = asyncio.create_task(drainer.run())
    appended = []
    for number in range(200):
        # Not awaited: on a slow disk they would come one in a drain's pause.
        appended.append(spool.append(encode_frame(captured(f"e{number}"))))
        await asyncio.sleep(0.002)
    assert all(await asyncio.gather(*appended))
    await eventually(lambda: _all_moved(batches, 200))
    drainer.stop()
    await running_drain
    assert len([moved for moved in batches if moved]) <= 100
    await engine.dispose()


async def test_what_waits_for_the_first_connection_is_stored_once_there_is_one(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look a second would let all records of a start wait for up to a second more."""
    monkeypatch.setattr(drain, "RETRY_S", 600.0)
    spool = Spool(tmp_path / "0", segment_bytes=2**20)
    assert await spool.append(encode_frame(captured()))
    connections: list[AsyncEngine] = []
    drainer = Drainer(tmp_path, lambda: connections[0] if connections else None, batch=10)
    draining = asyncio.create_task(drainer.run())
    await until(lambda: drainer.progress.state == "waiting")
    connections.append(engine)

    async def stored() -> bool:
        async with engine.connect() as connection:
            return len(await episode_ids(connection)) == 1

    await eventually(stored)
    drainer.stop()
    await draining
    spool.close()


async def test_a_busy_worker_keeps_no_other_waiting(database_url: str, tmp_path: Path) -> None:
    engine = make_engine(database_url)
    for worker in ("0", "1", "2"):
        spool = Spool(tmp_path / worker, segment_bytes=2**20)
        for number in range(4):
            await spool.append(encode_frame(captured(f"{worker}-{number}")))
    drainer = Drainer(tmp_path, lambda: engine, batch=2)
    # The first has more than a batch all the time, and each gets its turn all the same.
    assert await drainer.drain_once() == 6
    async with engine.connect() as connection:
        assert len(await episode_ids(connection)) == 6
    assert await drainer.drain_once() == 6
    assert await drainer.drain_once() == 0
    await engine.dispose()


async def _all_moved(batches: list[int | None], count: int) -> bool:
    return sum(moved or 0 for moved in batches) == count


async def test_one_record_that_cannot_be_stored_stops_no_other(
    database_url: str, tmp_path: Path
) -> None:
    engine = make_engine(database_url)
    spool = Spool(tmp_path / "0", segment_bytes=2**20)
    # No desk takes such a name; of what a client or a server says, the like is escaped.
    bad = statement("nul\x00", 1.0, episode="bad")
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


async def test_a_record_that_cannot_be_read_is_one_dead_letter_however_long_the_database_is_away(
    database_url: str, tmp_path: Path
) -> None:
    engine = make_engine("postgresql://nobody@127.0.0.1:1/none")
    drainer = Drainer(tmp_path, lambda: engine, batch=10)
    spool = Spool(tmp_path / "0", segment_bytes=2**20)
    for frame in (encode_frame(captured("a")), FOREIGN, encode_frame(captured("b"))):
        await spool.append(frame)
    spool.close()
    for _ in range(3):
        with pytest.raises(OSError, match="onnect"):
            await drainer.drain_once()
    await drainer.count()
    assert_adds_up()
    assert not (tmp_path / "dead").exists()
    await engine.dispose()
    engine = make_engine(database_url)
    assert await drainer.drain_once() == 3
    assert len(list((tmp_path / "dead").glob("*.letter"))) == 1
    await drainer.count()
    assert_adds_up()
    await engine.dispose()


async def test_a_new_ingester_counts_all_of_a_segment_that_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_reader, "READ_BYTES", 4096)
    spool = Spool(tmp_path / "0", segment_bytes=2**20)
    for number in range(50):
        await spool.append(encode_frame(captured(f"e{number}")))
    spool.close()
    drainer = Drainer(tmp_path, lambda: None, batch=10, counted_before=50)
    await drainer.count()
    assert ledger()["pawl_records_spooled"] == 50


async def test_the_next_ingester_goes_on_where_a_killed_one_ended(
    database_url: str, tmp_path: Path
) -> None:
    engine = make_engine(database_url)
    spool = Spool(tmp_path / "0", segment_bytes=2**20)
    for number in range(5):
        await spool.append(encode_frame(captured(f"e{number}")))
    killed = Drainer(tmp_path, lambda: engine, batch=2)
    await killed.count()
    assert await killed.drain_once() == 2
    await spool.append(encode_frame(captured("new")))
    before = ledger()
    follower = Drainer(tmp_path, lambda: engine, batch=10, counted_before=3)
    assert await follower.drain_once() == 4
    await follower.count()
    after = ledger()
    assert after["pawl_records_total"] - before["pawl_records_total"] == 1
    assert after["pawl_records_stored_total"] - before["pawl_records_stored_total"] == 4
    assert_adds_up()
    spool.close()
    await engine.dispose()


async def test_a_segment_that_somebody_removed_is_counted_as_dropped(
    database_url: str, tmp_path: Path
) -> None:
    engine = make_engine(database_url)
    spool = Spool(tmp_path / "0", segment_bytes=2**20)
    await spool.append(encode_frame(captured("a")))
    drainer = Drainer(tmp_path, lambda: engine, batch=10)
    await drainer.count()
    before = ledger()["pawl_records_dropped_total"]
    [segment] = [path for path in tmp_path.glob("0/*.open") if path.stat().st_size]
    segment.unlink()
    assert await drainer.drain_once() == 0
    assert ledger()["pawl_records_dropped_total"] == before + 1
    assert_adds_up()
    # What comes after it is written where it can be found.
    assert await spool.append(encode_frame(captured("b")))
    spool.close()
    assert await drainer.drain_once() == 1
    async with engine.connect() as connection:
        assert len(await episode_ids(connection)) == 1
    await engine.dispose()
