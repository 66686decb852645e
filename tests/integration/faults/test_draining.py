"""The drain stores each record once, many at a time, and goes on where an ingester ended."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.ingester import drain, segment_reader
from proxy.ingester.drain import Drainer
from proxy.spool.recorder import Spool
from proxy.spool.segments import encode_frame, frame_payload
from store.database import make_engine
from tests.integration.faults.conftest import Spooled
from tests.support.faults.counters import assert_adds_up, ledger
from tests.support.records import captured, reward, statement
from tests.support.waiting import eventually, until

# A whole frame that is none of ours.
FOREIGN = frame_payload(b"\x93\x01\x02")


@pytest.fixture
def spool(spooled: Spooled) -> Spool:
    """A worker's."""
    return Spool(spooled.folder / "0", segment_bytes=2**20)


async def append(spool: Spool, *episodes: str) -> None:
    for episode in episodes:
        assert await spool.append(encode_frame(captured(episode)))


async def test_records_that_arrive_singly_are_stored_in_batches(
    spooled: Spooled, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drainer = Drainer(spooled.folder, lambda: spooled.engine, batch=500)
    batches: list[int] = []
    drain_once = drainer.drain_once

    async def counted() -> int | None:
        moved = await drain_once()
        batches.append(moved or 0)
        return moved

    monkeypatch.setattr(drainer, "drain_once", counted)
    draining = asyncio.create_task(drainer.run())
    appended = []
    for number in range(200):
        # Not awaited: on a slow disk they would come one in a drain's pause.
        appended.append(spool.append(encode_frame(captured(f"e{number}"))))
        await asyncio.sleep(0.002)
    assert all(await asyncio.gather(*appended))
    await until(lambda: sum(batches) == 200)
    drainer.stop_after_batch()
    await draining
    assert len([moved for moved in batches if moved]) <= 100


async def test_waiting_records_are_stored_as_soon_as_the_database_connects(
    spooled: Spooled, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look a second would let all records of a start wait for up to a second more."""
    monkeypatch.setattr(drain, "RETRY_S", 600.0)
    await append(spool, "e")
    connections: list[AsyncEngine] = []
    drainer = Drainer(spooled.folder, lambda: connections[0] if connections else None, batch=10)
    draining = asyncio.create_task(drainer.run())
    await until(lambda: drainer.progress.state == "waiting")
    connections.append(spooled.engine)
    await eventually(spooled.stored)
    drainer.stop_after_batch()
    await draining
    spool.close()


@pytest.mark.parametrize("was_connected", [True, False])
async def test_final_drain_waits_for_an_unreachable_database(
    spooled: Spooled, spool: Spool, monkeypatch: pytest.MonkeyPatch, was_connected: bool
) -> None:
    monkeypatch.setattr(drain, "RETRY_S", 0.01)
    away = make_engine("postgresql://nobody@127.0.0.1:1/none")
    engine = away if was_connected else None
    asked = 0

    def connect() -> AsyncEngine | None:
        nonlocal asked
        asked += 1
        return engine

    drainer = Drainer(spooled.folder, connect, batch=2)
    # Nobody waits for the database with nothing to store.
    await drainer.drain_rest()
    await append(spool, *[f"e{number}" for number in range(5)])
    spool.close()
    draining, asked = asyncio.create_task(drainer.drain_rest()), 0
    await until(lambda: asked > 1)
    engine = spooled.engine
    await draining
    assert await spooled.stored() == 5
    assert spooled.segments() == []
    await away.dispose()


async def test_busy_workers_records_do_not_delay_other_workers(spooled: Spooled) -> None:
    for worker in ("0", "1", "2"):
        own = Spool(spooled.folder / worker, segment_bytes=2**20)
        await append(own, *[f"{worker}-{number}" for number in range(4)])
    drainer = Drainer(spooled.folder, lambda: spooled.engine, batch=2)
    # The first has more than a batch all the time, and each gets its turn all the same.
    assert await drainer.drain_once() == 6
    assert await spooled.stored() == 6
    assert await drainer.drain_once() == 6
    assert await drainer.drain_once() == 0


async def test_record_that_cannot_be_stored_stops_no_other(spooled: Spooled) -> None:
    # No endpoint takes such a name; in what a client or a server says, it is escaped.
    bad = statement("nul\x00", 1.0, episode="bad")
    a, b, c = map(captured, "abc")
    spooled.write(a, b, bad, c, reward(1.0, episode="a"))
    assert await spooled.drainer.drain_once() == 5
    assert await spooled.stored() == 3
    assert "0x00" in spooled.reasons()
    await spooled.drain()


async def test_unreadable_record_becomes_a_single_dead_letter_despite_an_outage(
    spooled: Spooled, spool: Spool
) -> None:
    engine = away = make_engine("postgresql://nobody@127.0.0.1:1/none")
    drainer = Drainer(spooled.folder, lambda: engine, batch=10)
    await append(spool, "a")
    await spool.append(FOREIGN)
    await append(spool, "b")
    spool.close()
    for _ in range(3):
        with pytest.raises(OSError, match="onnect"):
            await drainer.drain_once()
    await drainer.count()
    assert_adds_up()
    assert spooled.letters() == []
    await away.dispose()
    engine = spooled.engine
    assert await drainer.drain_once() == 3
    assert len(spooled.letters()) == 1
    await drainer.count()


async def test_next_ingester_counts_all_records_of_a_segment_that_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_reader, "READ_BYTES", 4096)
    spool = Spool(tmp_path / "0", segment_bytes=2**20)
    await append(spool, *[f"e{number}" for number in range(50)])
    spool.close()
    drainer = Drainer(tmp_path, lambda: None, batch=10, counted_before=50)
    await drainer.count()
    assert ledger()["pawl_records_spooled"] == 50


async def test_next_ingester_resumes_a_killed_ingesters_drain(
    spooled: Spooled, spool: Spool
) -> None:
    await append(spool, *[f"e{number}" for number in range(5)])
    killed = Drainer(spooled.folder, lambda: spooled.engine, batch=2)
    await killed.count()
    assert await killed.drain_once() == 2
    await append(spool, "new")
    before = ledger()
    follower = Drainer(spooled.folder, lambda: spooled.engine, batch=10, counted_before=3)
    assert await follower.drain_once() == 4
    await follower.count()
    after = ledger()
    assert after["pawl_records_total"] - before["pawl_records_total"] == 1
    assert after["pawl_records_stored_total"] - before["pawl_records_stored_total"] == 4
    spool.close()


async def test_records_of_a_removed_segment_are_counted_as_dropped(
    spooled: Spooled, spool: Spool
) -> None:
    await append(spool, "a")
    await spooled.drainer.count()
    before = ledger()["pawl_records_dropped_total"]
    [segment] = [path for path in spooled.folder.glob("0/*.open") if path.stat().st_size]
    segment.unlink()
    assert await spooled.drainer.drain_once() == 0
    assert ledger()["pawl_records_dropped_total"] == before + 1
    assert_adds_up()
    # What comes after it is written where it can be found.
    await append(spool, "b")
    spool.close()
    assert await spooled.drainer.drain_once() == 1
    assert await spooled.stored() == 1
    await spooled.drain()
