"""`pawl proxy` on a spool disk that is full, fails or hangs: no process and no call stops."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.faults.conftest import mounted
from tests.support.faults.ledger import Scrapes, kept, scrape
from tests.support.faults.load import fetch
from tests.support.faults.stand import Stand, running_stand
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.servers.raw_upstream import post, raw_ask
from tests.support.waiting import eventually, until

BODY = b'{"model":"m","messages":[{"role":"user","content":"q"}]}'
CHAT = post("/v1/chat/completions", BODY)


def fill(folder: Path) -> list[Path]:
    """Leave no byte and no file."""
    made = [folder / "filling"]
    with made[0].open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    try:
        for number in range(1000):
            path = folder / f"filling-{number}"
            path.touch()
            made.append(path)
    except OSError:
        return made
    raise AssertionError("the disk is not full")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The spool's folder, on a disk of 4 MB and 100 files."""
    folder = tmp_path / "spool"
    folder.mkdir()
    yield from mounted(folder, "size=4m,nr_inodes=100")


@pytest.fixture
async def stand(
    upstream: FakeUpstream, small_disk: Path, tmp_path: Path, own_cluster: None
) -> AsyncIterator[Stand]:
    """Two workers, whose spool is a small disk."""
    async with running_stand(tmp_path, upstream.url, 2) as found:
        yield found


async def answered(stand: Stand) -> bool:
    return b"200 OK" in (await raw_ask(stand.port, CHAT)).partition(b"\r\n")[0]


async def readyz(stand: Stand) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await fetch(stand.admin, "/readyz")).body)
    return found


async def new_series(stand: Stand) -> None:
    """What was never counted before: other refusals, other paths, other statuses."""
    for path in ("/nowhere", "/v1/embeddings", "/v1/moderations", "/v1/audio/speech", "/feedback"):
        await raw_ask(stand.port, post(path, b"{"))


def log_of(stand: Stand) -> str:
    return stand.log.read_text(errors="replace")


@pytest.mark.timeout(240)
async def test_full_disk_stops_no_process_and_no_call(stand: Stand) -> None:
    assert await answered(stand)
    scrapes = Scrapes()

    async def stored() -> bool:
        found = await scrape(stand.admin, scrapes)
        return found is not None and found["pawl_records_stored_total"] >= 1

    await eventually(stored)
    filling = fill(stand.spool)
    before = {process.pid for process in stand.processes("worker")}
    # Nothing dies of what it counts.
    await new_series(stand)
    assert await answered(stand)
    assert {process.pid for process in stand.processes("worker")} == before

    # A worker that cannot start does not replace one that serves.
    stand.supervisor.send_signal(signal.SIGHUP)

    def is_decided() -> bool:
        log = log_of(stand)
        return '"workers_not_replaced"' in log or '"workers_replaced"' in log

    await until(is_decided)
    assert await answered(stand)

    # A killed process is started again, on the same full disk.
    for process in [*stand.processes("worker"), *stand.processes("ingester")]:
        process.kill()
        await asyncio.to_thread(psutil.wait_procs, [process], 30)
    await stand.ready()
    assert await answered(stand)
    await new_series(stand)
    assert stand.supervisor.poll() is None
    assert await scrape(stand.admin, scrapes) is not None

    for path in filling:
        path.unlink()
    assert await answered(stand)
    await eventually(stored)
    assert (scrapes.off, scrapes.failed) == ([], [])
    workers = (await readyz(stand))["workers"]
    assert [(worker["state"], worker["last_exit"]) for worker in workers] == [("up", -9)] * 2


@pytest.mark.timeout(240)
async def test_worker_that_keeps_ending_does_not_stop_the_proxy(
    stand: Stand,
) -> None:
    """Seven times, each soon after it has begun; readiness says how often."""
    for _ in range(7):
        [*_, victim] = stand.processes("worker")
        victim.terminate()
        await asyncio.to_thread(psutil.wait_procs, [victim], 30)
        assert stand.supervisor.poll() is None
        await stand.ready()
    workers = (await readyz(stand))["workers"]
    assert sum(worker["restarts"] for worker in workers) == 7
    assert (await fetch(stand.admin, "/readyz")).status == 200


@pytest.mark.timeout(600)
async def test_readyz_is_503_while_no_worker_takes_calls(stand: Stand) -> None:
    for process in stand.processes("worker"):
        # It keeps the supervisor from starting another in a moment: it ends for good, and slowly.
        process.suspend()
        process.send_signal(signal.SIGKILL)

    async def away() -> bool:
        return (await fetch(stand.admin, "/readyz")).status == 503

    async def back() -> bool:
        return (await readyz(stand))["status"] == "ready"

    await eventually(away)
    await stand.ready()
    # A worker takes its first call a moment before the supervisor knows of it.
    await eventually(back)


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("own_cluster")
async def test_proxy_waits_for_room_if_the_spool_disk_is_full_at_its_first_start(
    upstream: FakeUpstream, small_disk: Path, tmp_path: Path
) -> None:
    filling = fill(small_disk)
    async with running_stand(tmp_path, upstream.url, 2, ready=False) as stand:

        def has_ended(times: int) -> bool:
            ends = log_of(stand).count('"child_ended"')
            return stand.supervisor.poll() is not None or ends >= times

        # More often than a process may end whose settings cannot work.
        await until(lambda: has_ended(6))
        assert stand.supervisor.poll() is None
        for path in filling:
            path.unlink()
        await stand.ready()
        assert await answered(stand)
        assert stand.supervisor.poll() is None


FAULTS = """
import os, threading, time
control = os.environ.get("DISK_FAULTS")

def wrapped(name, real):
    def call(*args, **more):
        if threading.current_thread().name == "pawl-spool":
            try:
                with open(control) as file:
                    wanted = file.read().split()
            except OSError:
                wanted = []
            if "hang" in wanted and name == "fdatasync":
                time.sleep(600)
            if name in wanted:
                raise OSError(5, "Input/output error")
        return real(*args, **more)
    return call

if control:
    for name in ("write", "fdatasync", "ftruncate", "close"):
        setattr(os, name, wrapped(name, getattr(os, name)))
"""


@pytest.fixture
async def faulty(
    upstream: FakeUpstream,
    tmp_path: Path,
    own_cluster: None,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Stand, Path]]:
    """A proxy whose worker's disk fails as a file says."""
    control, code = tmp_path / "faults", tmp_path / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(FAULTS)
    control.write_text("")
    monkeypatch.setenv("DISK_FAULTS", str(control))
    paths = [str(code), os.environ.get("PYTHONPATH", ""), str(Path.cwd())]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    async with running_stand(tmp_path, upstream.url, 1) as stand:
        yield stand, control


async def ask(stand: Stand) -> str:
    """A call's id; the answer has come."""
    reply = await asyncio.wait_for(raw_ask(stand.port, CHAT), 30)
    head = reply.partition(b"\r\n\r\n")[0]
    assert head.startswith(b"HTTP/1.1 200"), head
    [call] = [line[12:] for line in head.split(b"\r\n") if line.lower().startswith(b"x-pawl-call:")]
    return call.strip().decode()


@pytest.mark.timeout(600)
async def test_proxy_answers_through_io_errors_of_the_spool_disk_and_recovers_by_itself(
    faulty: tuple[Stand, Path],
) -> None:
    stand, control = faulty
    calls = [await ask(stand)]
    [worker] = stand.processes("worker")
    for faults in ("fdatasync", "write ftruncate", "write fdatasync ftruncate close"):
        control.write_text(faults)
        for _ in range(3):
            await ask(stand)
        control.write_text("")
        calls.append(await ask(stand))
    assert [found.pid for found in stand.processes("worker")] == [worker.pid]

    async def are_all_kept() -> bool:
        return (await kept(stand.url, calls, own_episodes=False)).missing == 0

    await eventually(are_all_kept)
    scrapes = Scrapes()
    found = await scrape(stand.admin, scrapes)
    assert found is not None
    assert found["pawl_records_dropped_total"] >= 9
    assert scrapes.off == []
    began = time.monotonic()
    stand.supervisor.send_signal(signal.SIGTERM)
    await asyncio.to_thread(stand.supervisor.wait, 30)
    assert time.monotonic() - began < 20


@pytest.mark.timeout(600)
async def test_proxy_with_a_hanging_spool_disk_answers_calls_and_can_be_stopped(
    faulty: tuple[Stand, Path],
) -> None:
    stand, control = faulty
    await ask(stand)
    control.write_text("hang")
    began = time.monotonic()
    waiting = asyncio.create_task(ask(stand))

    async def is_shown() -> bool:
        found = await scrape(stand.admin, Scrapes())
        return found is not None and found["pawl_spool_commit_seconds"] > 1

    await eventually(is_shown)
    await waiting
    assert time.monotonic() - began > 5
    # From now on nobody waits for it.
    began = time.monotonic()
    await ask(stand)
    assert time.monotonic() - began < 10
    stand.supervisor.send_signal(signal.SIGTERM)
    await asyncio.to_thread(stand.supervisor.wait, 30)
    assert time.monotonic() - began < 40
