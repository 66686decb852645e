"""SIGTERM to a whole `pawl proxy`: it ends within its grace period, whatever its clients do."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from pawl.serving.process import STOP, end
from tests.integration.faults.test_faulty_processes import begun, down, slow, up
from tests.integration.faults.test_slow_clients import asleep, endless
from tests.support.faults.stand import Stand
from tests.support.servers.fake_upstream import fake_upstream
from tests.support.servers.raw_upstream import post, raw_upstream
from tests.support.waiting import at_rest, eventually

# As many of each as the bar has.
EACH = int(os.environ.get("STALLED_CLIENTS", "100"))
GRACE_S = 20.0
BODY = b'{"model":"m","messages":[{"role":"user","content":"q"}],"stream":true}'
CHAT = post("/v1/chat/completions", BODY)
log = structlog.get_logger()


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


async def ended(stand: Stand) -> float:
    """Seconds from SIGTERM until the supervisor is gone."""
    began = time.monotonic()
    stand.supervisor.send_signal(signal.SIGTERM)
    await asyncio.to_thread(stand.supervisor.wait, 40)
    assert stand.supervisor.returncode == 0
    return time.monotonic() - began


@pytest.mark.usefixtures("own_cluster")
@pytest.mark.timeout(600)
async def test_it_ends_in_time_with_stalled_readers_and_dribbling_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAWL_STOP_GRACE_S", str(GRACE_S))
    async with raw_upstream() as upstream:
        upstream.script = endless
        stand = await up(tmp_path, upstream.port, 2)
        sleepers = [await asleep(stand.port, CHAT) for _ in range(EACH)]
        dribblers = [await dribbler(stand.port) for _ in range(EACH)]

        async def all_asked() -> bool:
            return len(upstream.heads) == EACH

        await eventually(all_asked)
        # All that lies between the upstream and those who sleep is full.
        await at_rest(lambda: upstream.said, 0.5)
        took = await ended(stand)
        log.info("stopped", each=EACH, grace_s=GRACE_S, seconds=round(took, 2))
        for writer in dribblers:
            writer.transport.going.cancel()  # type: ignore[attr-defined]
            writer.close()
        for sleeper in sleepers:
            sleeper.close()
        await down(stand)
    assert took < GRACE_S
    text = stand.log.read_text()
    assert text.count('"status":"client_gone"') == EACH
    # The ingester may be in the middle of storing so much: the rest stays in the spool.
    assert not [line for line in text.splitlines() if "child_killed" in line and "worker" in line]


@pytest.mark.usefixtures("own_cluster")
async def test_a_stream_that_goes_on_is_broken_off_at_the_end_of_the_grace_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAWL_STOP_GRACE_S", str(GRACE_S))
    go_on = asyncio.Event()
    async with fake_upstream() as upstream:
        slow(go_on, upstream)
        stand = await up(tmp_path, int(upstream.url.split(":")[2].split("/")[0]), 1)
        reader, writer = await begun(stand.port)
        took = await ended(stand)
        with suppress(ConnectionResetError):
            assert not (await reader.read()).endswith(b"0\r\n\r\n")
        writer.close()
        go_on.set()
        await down(stand)
    assert GRACE_S / 2 <= took < GRACE_S
    assert '"status":"client_gone"' in stand.log.read_text()
    assert "calls_broken_off" in stand.log.read_text()


@pytest.mark.usefixtures("own_cluster")
async def test_a_replaced_workers_streams_have_more_time_than_a_stop_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAWL_STOP_GRACE_S", "1")
    go_on = asyncio.Event()
    async with fake_upstream() as upstream:
        slow(go_on, upstream)
        stand = await up(tmp_path, int(upstream.url.split(":")[2].split("/")[0]), 1)
        reader, writer = await begun(stand.port)
        stand.supervisor.send_signal(signal.SIGHUP)
        # Longer than a stop would give them, and the stream is still there.
        await asyncio.sleep(4.0)
        go_on.set()
        assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()
        await down(stand)


async def test_a_process_that_does_not_heed_its_end_is_killed() -> None:
    deaf = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    )
    process = await asyncio.create_subprocess_exec(
        "python3", "-c", deaf, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    began = time.monotonic()
    await end(process, "deaf", STOP, 0.5)
    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 30
