"""`pawl proxy` as it runs: processes killed, told to stop or start anew; a reader who sleeps.

`docs/decisions/016-faults.md` has the table.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from benchmarks.chaos.__main__ import broken_promises
from benchmarks.chaos.calls import kills
from tests.support.faults.ledger import Scrapes, drained, kept
from tests.support.faults.load import Load
from tests.support.faults.stand import CannotInjectFaults, Stand, standing
from tests.support.servers.fake_upstream import FakeUpstream, fake_upstream
from tests.support.servers.raw_upstream import RawUpstream, post, raw_ask, raw_upstream
from tests.support.waiting import at_rest, eventually, until

BODY = b'{"model":"m","messages":[{"role":"user","content":"q"}],"stream":true}'
CHAT = post("/v1/chat/completions", BODY)
MOST_GROWTH = 32 * 2**20
# Eighty calls a second: the kills are what is tested, and not how much is stored a second.
PAUSE_S = 0.2


async def up(folder: Path, upstream_port: int, workers: int) -> Stand:
    stand = await asyncio.to_thread(Stand, folder, upstream_port, workers)
    await stand.ready()
    return stand


async def down(stand: Stand) -> None:
    if stand.supervisor.poll() is None:
        await asyncio.to_thread(stand.stop)
    await asyncio.to_thread(stand.postgres.stop)


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with fake_upstream() as server:
        yield server


@pytest.fixture
async def stand(upstream: FakeUpstream, tmp_path: Path, own_cluster: None) -> AsyncIterator[Stand]:
    """Two workers."""
    found = await up(tmp_path, int(upstream.url.split(":")[2].split("/")[0]), 2)
    yield found
    await down(found)


async def stored(stand: Stand, answered: list[str]) -> None:
    """Nothing that was answered is missing."""
    scrapes = Scrapes()
    assert await drained(stand.admin, scrapes, within_s=20) is not None
    assert (scrapes.off, scrapes.failed) == ([], [])
    assert (await kept(stand.url, answered, own_episodes=False)).missing == 0


def slow(go_on: asyncio.Event, upstream: FakeUpstream) -> None:
    """Streams that begin, and end when they are told to."""

    async def behave(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[]}\n\n')
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    upstream.behave = behave


async def begun(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream whose first event has arrived."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(CHAT)
    await reader.readuntil(b'{"choices":[]}\n\n')
    return reader, writer


def is_leaving(worker: psutil.Process, port: int) -> bool:
    """Whether a worker that still runs takes no new connections."""
    with suppress(psutil.NoSuchProcess):
        return not any(
            at.laddr.port == port and at.status == "LISTEN" for at in worker.net_connections()
        )
    return False


def load_on(stand: Stand) -> Load:
    load = Load(stand.port, at_once=4, pause_s=0.005, calls_per_episode=10)
    load.start()
    return load


async def test_a_killed_worker_costs_its_own_calls_and_nothing_else(
    stand: Stand, upstream: FakeUpstream
) -> None:
    go_on = asyncio.Event()
    slow(go_on, upstream)
    streams = [await begun(stand.port) for _ in range(12)]
    before = {p.pid: _connections(p, stand.port) for p in stand.processes("worker")}
    assert sum(before.values()) == len(streams)
    victim = max(before, key=lambda pid: before[pid])
    os.kill(victim, signal.SIGKILL)
    await stand.ready()
    go_on.set()
    ends = [await _rest(reader) for reader, _ in streams]
    whole = [end.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for end in ends]
    assert whole.count(True) == len(streams) - before[victim]
    for _, writer in streams:
        writer.close()
    upstream.behave = None
    load = load_on(stand)
    await load.reached(50)
    await load.stop()
    assert load.outcome.failed == []
    await stored(stand, load.outcome.complete)


def _connections(process: psutil.Process, port: int) -> int:
    return sum(
        at.laddr.port == port and at.status == "ESTABLISHED" for at in process.net_connections()
    )


async def _rest(reader: asyncio.StreamReader) -> bytes:
    with suppress(ConnectionResetError):
        return await reader.read()
    return b""


async def test_a_killed_ingester_is_noticed_by_nobody(stand: Stand) -> None:
    load = load_on(stand)
    await load.reached(50)
    await stand.kill("ingester", 0)
    await load.reached(len(load.outcome.complete) + 50)
    await load.stop()
    assert load.outcome.failed == []
    assert load.outcome.refused == 0
    await stored(stand, load.outcome.complete)


async def test_a_killed_supervisor_takes_the_others_with_it_and_a_new_one_stores_the_rest(
    stand: Stand, upstream: FakeUpstream
) -> None:
    go_on = asyncio.Event()
    slow(go_on, upstream)
    reader, writer = await begun(stand.port)
    children = stand.processes("worker") + stand.processes("ingester")
    await asyncio.to_thread(stand.postgres.stop)
    stand.supervisor.kill()
    stand.supervisor.wait()
    await stand.start_postgres()
    # The port is free at once, though a stream is still being answered.
    await stand.restart()
    await stand.ready()
    go_on.set()
    assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()

    async def ended() -> bool:
        return not any(child.is_running() for child in children)

    await eventually(ended)

    async def both() -> bool:
        return (await kept(stand.url, [], own_episodes=False)).stored == 1

    await eventually(both)


async def test_hup_replaces_the_workers_and_no_request_fails(
    stand: Stand, upstream: FakeUpstream
) -> None:
    go_on = asyncio.Event()
    slow(go_on, upstream)
    reader, writer = await begun(stand.port)
    upstream.behave = None
    workers = stand.processes("worker")
    before = {p.pid for p in workers}
    [streaming] = [p for p in workers if _connections(p, stand.port)]
    load = load_on(stand)
    await load.reached(50)
    stand.supervisor.send_signal(signal.SIGHUP)
    await until(lambda: is_leaving(streaming, stand.port))
    go_on.set()
    assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()

    async def replaced() -> bool:
        now = {p.pid for p in stand.processes("worker")}
        return len(now) == 2 and not now & before

    await eventually(replaced)
    await load.reached(len(load.outcome.complete) + 50)
    await load.stop()
    assert load.outcome.failed == []
    assert load.outcome.refused == 0
    await stored(stand, load.outcome.complete)


async def refused(stand: Stand) -> bool:
    """Whether nobody takes a connection any more."""
    with suppress(ConnectionRefusedError):
        await raw_ask(stand.port, b"")
        return False
    return True


async def test_term_finishes_streams_and_takes_no_new_connection(
    stand: Stand, upstream: FakeUpstream
) -> None:
    go_on = asyncio.Event()
    slow(go_on, upstream)
    reader, writer = await begun(stand.port)
    stand.supervisor.send_signal(signal.SIGTERM)

    await eventually(lambda: refused(stand))
    assert stand.supervisor.poll() is None
    go_on.set()
    assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()
    await asyncio.to_thread(stand.supervisor.wait, 20)
    assert stand.supervisor.returncode == 0
    assert (await kept(stand.url, [], own_episodes=False)).stored == 1


async def test_term_is_heeded_in_the_middle_of_a_rolling_restart(
    stand: Stand, upstream: FakeUpstream
) -> None:
    go_on = asyncio.Event()
    slow(go_on, upstream)
    streams = [await begun(stand.port) for _ in range(8)]
    workers = stand.processes("worker")
    stand.supervisor.send_signal(signal.SIGHUP)
    await until(lambda: any(is_leaving(worker, stand.port) for worker in workers))
    stand.supervisor.send_signal(signal.SIGTERM)
    await eventually(lambda: refused(stand))
    assert stand.supervisor.poll() is None
    go_on.set()
    for reader, writer in streams:
        assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()
    await asyncio.to_thread(stand.supervisor.wait, 20)
    assert stand.supervisor.returncode == 0
    assert (await kept(stand.url, [], own_episodes=False)).stored == len(streams)


@pytest.mark.usefixtures("own_cluster")
async def test_a_reader_who_sleeps_costs_no_memory(tmp_path: Path) -> None:
    """200 MB to a client that reads nothing for a while, then all of it."""
    line = b"data: " + b"x" * 65_528 + b"\n\n"
    lines = 200 * 2**20 // len(line)

    async def much(server: RawUpstream, writer: asyncio.StreamWriter) -> None:
        await server.say(
            writer,
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n",
        )
        for _ in range(lines):
            await server.say(writer, b"%x\r\n%b\r\n" % (len(line), line))
        await server.say(writer, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async with raw_upstream() as upstream:
        upstream.script = much
        stand = await up(tmp_path, upstream.port, 1)
        await raw_ask(stand.port, post("/v1/embeddings", b"{}"))
        upstream.said = 0
        [worker] = stand.processes("worker")
        before = most = worker.memory_info().rss
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        writer.write(CHAT)
        assert await at_rest(lambda: upstream.said, 2.0) < 32 * 2**20
        received = 0
        while data := await reader.read(2**20):
            received += len(data)
            most = max(most, worker.memory_info().rss)
        writer.close()
        await down(stand)
    assert received > lines * len(line)
    assert most - before < MOST_GROWTH


@pytest.mark.usefixtures("own_cluster")
@pytest.mark.timeout(600)
def test_ten_kills_lose_nothing_store_nothing_twice_and_the_counters_add_up(
    tmp_path: Path,
) -> None:
    with standing(tmp_path, 2) as stand:
        found = asyncio.run(kills(stand, 10, seed=3, pause_s=PAUSE_S))
    assert sum(found["kills"].values()) == 10
    assert len(found["kills"]) >= 3
    assert found["answered"] > 100
    assert (found["missing"], found["twice"]) == (0, 0)
    assert (found["scrapes_off"], found["scrapes_failed"]) == ([], [])
    assert found["failed_otherwise"] == []
    assert found["drain_s"] is not None


@pytest.mark.usefixtures("own_cluster")
@pytest.mark.timeout(600)
def test_kills_a_failing_disk_and_poison_lose_nothing_and_stop_nothing(tmp_path: Path) -> None:
    """Six kills, a full disk, I/O errors, and poison in one record of 200."""
    try:
        with standing(tmp_path, 2, faults=True) as stand:
            found = asyncio.run(kills(stand, 6, seed=5, pause_s=PAUSE_S))
    except CannotInjectFaults as error:
        pytest.skip(str(error))
    assert broken_promises(found) == []
    assert found["faults"] == {"full disk": 1, "I/O errors": 1}
    assert found["poisoned_calls"] > 0
    assert found["poisoned_segments"] > 0
    assert found["dropped_and_marked"] > 0
