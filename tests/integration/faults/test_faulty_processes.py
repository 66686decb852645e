"""`pawl proxy` as it runs: processes killed, stopped or replaced; a reader who sleeps.

`docs/decisions/016-faults.md` has the table.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
import structlog

from benchmarks.chaos.__main__ import broken_promises
from benchmarks.chaos.calls import kill_under_load
from pawl.serving.process import STOP, end_process
from tests.support.faults.ledger import Scrapes, drained, kept
from tests.support.faults.load import Load
from tests.support.faults.stand import (
    CannotInjectFaults,
    Stand,
    running_stand,
    standing,
    start_again,
)
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.servers.raw_upstream import (
    EVENTS,
    RawUpstream,
    asleep,
    chunked,
    endless,
    post,
    raw_ask,
    raw_upstream,
)
from tests.support.waiting import at_rest, eventually, until

BODY = b'{"model":"m","messages":[{"role":"user","content":"q"}],"stream":true}'
CHAT = post("/v1/chat/completions", BODY)
MOST_GROWTH = 32 * 2**20
# Eighty calls a second: the kills are what is tested, and not how much is stored a second.
PAUSE_S = 0.2
# The end of a stream that is whole.
WHOLE_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
# As many stalled clients of each kind.
EACH = int(os.environ.get("STALLED_CLIENTS", "100"))
GRACE_S = 20.0
DELAY_S = 4.0
log = structlog.get_logger()


@pytest.fixture
async def stand(upstream: FakeUpstream, tmp_path: Path, own_cluster: None) -> AsyncIterator[Stand]:
    """Two workers."""
    async with running_stand(tmp_path, upstream.url, 2) as found:
        yield found


async def assert_stored(stand: Stand, answered: list[str]) -> None:
    """Nothing that was answered is missing."""
    scrapes = Scrapes()
    assert await drained(stand.admin, scrapes, within_s=20) is not None
    assert (scrapes.off, scrapes.failed) == ([], [])
    assert (await kept(stand.url, answered, own_episodes=False)).missing == 0


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def begun(port: int) -> Stream:
    """A stream whose first event has arrived."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(CHAT)
    await reader.readuntil(b'{"choices":[]}\n\n')
    return reader, writer


async def rest(stream: Stream) -> bytes:
    """What else comes of a stream, until it ends or is torn."""
    reader, writer = stream
    received = b""
    with suppress(ConnectionResetError):
        received = await reader.read()
    writer.close()
    return received


@asynccontextmanager
async def loaded(stand: Stand) -> AsyncIterator[None]:
    """Clients ask before, during and after the block: each call is answered and stored."""
    load = Load(stand.port, at_once=4, pause_s=0.005, calls_per_episode=10)
    load.start()
    await load.reached(50)
    yield
    await load.reached(len(load.outcome.complete) + 50)
    await load.stop()
    assert (load.outcome.failed, load.outcome.refused) == ([], 0)
    await assert_stored(stand, load.outcome.complete)


async def test_killed_worker_costs_its_own_calls_and_nothing_else(
    stand: Stand, upstream: FakeUpstream
) -> None:
    go_on = upstream.hold_streams()
    streams = [await begun(stand.port) for _ in range(12)]
    before = {p.pid: stand.connections(p) for p in stand.processes("worker")}
    assert sum(before.values()) == len(streams)
    victim = max(before, key=lambda pid: before[pid])
    os.kill(victim, signal.SIGKILL)
    await stand.ready()
    go_on.set()
    ends = [await rest(stream) for stream in streams]
    whole = [end for end in ends if end.endswith(WHOLE_END)]
    assert len(whole) == len(streams) - before[victim]
    upstream.behave = None
    async with loaded(stand):
        pass


async def test_killed_ingester_is_noticed_by_no_client(stand: Stand) -> None:
    async with loaded(stand):
        await stand.kill("ingester", 0)


async def test_killed_supervisors_children_end_and_the_next_supervisor_stores_their_records(
    stand: Stand, upstream: FakeUpstream
) -> None:
    go_on = upstream.hold_streams()
    stream = await begun(stand.port)
    children = stand.processes("worker") + stand.processes("ingester")
    await asyncio.to_thread(stand.postgres.stop)
    stand.supervisor.kill()
    stand.supervisor.wait()
    await start_again(stand.postgres)
    # The port is free at once, though a stream is still being answered.
    await stand.restart()
    await stand.ready()
    go_on.set()
    assert (await rest(stream)).endswith(WHOLE_END)

    await until(lambda: not any(child.is_running() for child in children))

    async def is_stored() -> bool:
        return (await kept(stand.url, [], own_episodes=False)).stored == 1

    await eventually(is_stored)


async def test_sighup_replaces_the_workers_and_no_request_fails(
    stand: Stand, upstream: FakeUpstream
) -> None:
    go_on = upstream.hold_streams()
    stream = await begun(stand.port)
    upstream.behave = None
    workers = stand.processes("worker")
    before = {p.pid for p in workers}
    [streaming] = [p for p in workers if stand.connections(p)]

    def are_replaced() -> bool:
        now = {p.pid for p in stand.processes("worker")}
        return len(now) == 2 and not now & before

    async with loaded(stand):
        stand.supervisor.send_signal(signal.SIGHUP)
        await until(lambda: stand.is_leaving(streaming))
        go_on.set()
        assert (await rest(stream)).endswith(WHOLE_END)
        await until(are_replaced)


async def refused(stand: Stand) -> bool:
    """Whether nobody takes a connection any more."""
    with suppress(ConnectionRefusedError):
        await raw_ask(stand.port, b"")
        return False
    return True


async def test_sigterm_finishes_streams_and_takes_no_new_connection(
    stand: Stand, upstream: FakeUpstream
) -> None:
    go_on = upstream.hold_streams()
    stream = await begun(stand.port)
    stand.supervisor.send_signal(signal.SIGTERM)

    await eventually(lambda: refused(stand))
    assert stand.supervisor.poll() is None
    go_on.set()
    assert (await rest(stream)).endswith(WHOLE_END)
    assert await asyncio.to_thread(stand.supervisor.wait, 20) == 0
    assert (await kept(stand.url, [], own_episodes=False)).stored == 1


async def test_sigterm_during_a_rolling_restart_stops_the_proxy_after_its_streams(
    stand: Stand, upstream: FakeUpstream
) -> None:
    go_on = upstream.hold_streams()
    streams = [await begun(stand.port) for _ in range(8)]
    workers = stand.processes("worker")
    stand.supervisor.send_signal(signal.SIGHUP)
    await until(lambda: any(stand.is_leaving(worker) for worker in workers))
    stand.supervisor.send_signal(signal.SIGTERM)
    await eventually(lambda: refused(stand))
    assert stand.supervisor.poll() is None
    go_on.set()
    for stream in streams:
        assert (await rest(stream)).endswith(WHOLE_END)
    assert await asyncio.to_thread(stand.supervisor.wait, 20) == 0
    assert (await kept(stand.url, [], own_episodes=False)).stored == len(streams)


@pytest.mark.usefixtures("own_cluster")
async def test_client_that_stops_reading_slows_the_upstream_down_and_takes_no_memory(
    tmp_path: Path,
) -> None:
    """200 MB to a client that reads nothing for a while, then all of it."""
    line = b"data: " + b"x" * 65_528 + b"\n\n"
    lines = 200 * 2**20 // len(line)

    async def much(server: RawUpstream, writer: asyncio.StreamWriter) -> None:
        await server.say(writer, EVENTS)
        for _ in range(lines):
            await server.say(writer, chunked(line))
        await server.say(writer, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async with raw_upstream() as upstream, running_stand(tmp_path, upstream.url, 1) as stand:
        upstream.script = much
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
    assert received > lines * len(line)
    assert most - before < MOST_GROWTH


async def dribbler(port: int) -> asyncio.StreamWriter:
    """Begins a request, and sends the rest of it a byte at a time."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    cut = len(CHAT) - 60
    writer.write(CHAT[:cut])

    async def go_on() -> None:
        with suppress(ConnectionError):
            for byte in CHAT[cut:]:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1.0)

    writer.transport.going = asyncio.create_task(go_on())  # type: ignore[attr-defined]
    return writer


async def stopped(stand: Stand) -> float:
    """Seconds from SIGTERM until the supervisor is gone."""
    began = time.monotonic()
    stand.supervisor.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(stand.supervisor.wait, 40) == 0
    return time.monotonic() - began


@pytest.mark.usefixtures("own_cluster")
@pytest.mark.timeout(600)
async def test_sigterm_stops_the_proxy_in_time_despite_stalled_readers_and_slow_uploaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAWL_STOP_GRACE_S", str(GRACE_S))
    async with raw_upstream() as upstream, running_stand(tmp_path, upstream.url, 2) as stand:
        upstream.script = endless
        sleepers = [await asleep(stand.port, CHAT) for _ in range(EACH)]
        dribblers = [await dribbler(stand.port) for _ in range(EACH)]
        await until(lambda: len(upstream.heads) == EACH)
        # All that lies between the upstream and those who sleep is full.
        await at_rest(lambda: upstream.said, 0.5)
        took = await stopped(stand)
        log.info("stopped", each=EACH, grace_s=GRACE_S, seconds=round(took, 2))
        for writer in dribblers:
            writer.transport.going.cancel()  # type: ignore[attr-defined]
            writer.close()
        for sleeper in sleepers:
            sleeper.close()
    assert took < GRACE_S
    text = stand.log.read_text()
    assert text.count('"status":"client_gone"') == EACH
    # The ingester may be in the middle of storing so much: the rest stays in the spool.
    assert not [line for line in text.splitlines() if "child_killed" in line and "worker" in line]


@pytest.mark.usefixtures("own_cluster")
async def test_calls_are_answered_for_the_drain_delay_after_sigterm(
    upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAWL_DRAIN_DELAY_S", str(DELAY_S))
    async with (
        running_stand(tmp_path, upstream.url, 2) as stand,
        aiohttp.ClientSession() as session,
    ):
        health = f"http://127.0.0.1:{stand.port}/healthz"
        readiness = f"http://127.0.0.1:{stand.admin}/readyz"

        async def statuses() -> list[int]:
            return [(await session.get(url)).status for url in (health, readiness)]

        async def noticed() -> bool:
            return await statuses() == [503, 503]

        assert await statuses() == [200, 200]
        ending = asyncio.create_task(stopped(stand))
        await eventually(noticed)
        for _ in range(4):
            # Each is a new connection.
            reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
            writer.write(CHAT)
            assert (await rest((reader, writer))).endswith(WHOLE_END)
        assert await ending >= DELAY_S


@pytest.mark.usefixtures("own_cluster")
async def test_unfinished_stream_is_cut_off_at_the_end_of_the_stop_grace_and_recorded(
    upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAWL_STOP_GRACE_S", str(GRACE_S))
    go_on = upstream.hold_streams()
    async with running_stand(tmp_path, upstream.url, 1) as stand:
        stream = await begun(stand.port)
        took = await stopped(stand)
        assert not (await rest(stream)).endswith(b"0\r\n\r\n")
        go_on.set()
    assert GRACE_S / 2 <= took < GRACE_S
    assert '"status":"client_gone"' in stand.log.read_text()
    assert "calls_broken_off" in stand.log.read_text()


@pytest.mark.usefixtures("own_cluster")
async def test_replaced_workers_stream_outlives_the_stop_grace(
    upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAWL_STOP_GRACE_S", "1")
    go_on = upstream.hold_streams()
    async with running_stand(tmp_path, upstream.url, 1) as stand:
        stream = await begun(stand.port)
        stand.supervisor.send_signal(signal.SIGHUP)
        # Longer than a stop would give them, and the stream is still there.
        await asyncio.sleep(4.0)
        go_on.set()
        assert (await rest(stream)).endswith(WHOLE_END)


async def test_process_that_ignores_sigterm_is_killed() -> None:
    deaf = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", deaf, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    began = time.monotonic()
    await end_process(process, "deaf", STOP, 0.5)
    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 30


@pytest.mark.usefixtures("own_cluster")
@pytest.mark.timeout(600)
def test_ten_process_kills_lose_no_call_store_no_call_twice_and_the_counters_add_up(
    tmp_path: Path,
) -> None:
    with standing(tmp_path, 2) as stand:
        found = asyncio.run(kill_under_load(stand, 10, seed=3, pause_s=PAUSE_S))
    assert sum(found["kills"].values()) == 10
    assert len(found["kills"]) >= 3
    assert found["answered"] > 100
    assert (found["missing"], found["twice"]) == (0, 0)
    assert (found["scrapes_off"], found["scrapes_failed"]) == ([], [])
    assert found["failed_otherwise"] == []
    assert found["drain_s"] is not None


@pytest.mark.usefixtures("own_cluster")
@pytest.mark.timeout(600)
def test_process_kills_disk_faults_and_poison_records_lose_no_call_and_stop_no_process(
    tmp_path: Path,
) -> None:
    """Six kills, a full disk, I/O errors, and poison in one record of 200."""
    try:
        with standing(tmp_path, 2, faults=True) as stand:
            found = asyncio.run(kill_under_load(stand, 6, seed=5, pause_s=PAUSE_S))
    except CannotInjectFaults as error:
        pytest.skip(str(error))
    assert broken_promises(found) == []
    assert found["faults"] == {"full disk": 1, "I/O errors": 1}
    assert found["poisoned_calls"] > 0
    assert found["poisoned_segments"] > 0
    assert found["dropped_and_marked"] > 0
