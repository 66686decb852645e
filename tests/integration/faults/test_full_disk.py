"""`pawl proxy` on a spool disk without a byte and without a file left: nothing of it goes down."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.faults.ledger import Scrapes, scrape
from tests.support.faults.load import fetch
from tests.support.faults.stand import Stand
from tests.support.servers.fake_upstream import FakeUpstream, fake_upstream
from tests.support.servers.raw_upstream import post, raw_ask
from tests.support.waiting import eventually

BODY = b'{"model":"m","messages":[{"role":"user","content":"q"}]}'
CHAT = post("/v1/chat/completions", BODY)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A real file system of 4 MB and 100 files, mounted at `folder`; only root can mount."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=100", "tmpfs", str(folder)]
    subprocess.run(command, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


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
async def stand(tmp_path: Path, own_cluster: None) -> AsyncIterator[Stand]:
    """Two workers, whose spool is a small disk."""
    async with standing(tmp_path) as found:
        await found.ready()
        yield found


@asynccontextmanager
async def standing(
    tmp_path: Path, prepare: Callable[[Path], object] = bool
) -> AsyncIterator[Stand]:
    """The same, just started, on a disk that was prepared."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    async with fake_upstream() as upstream:
        with small_disk(tmp_path / "spool") as disk:
            prepare(disk)
            found = await asyncio.to_thread(Stand, tmp_path, port_of(upstream), 2)
            try:
                yield found
            finally:
                if found.supervisor.poll() is None:
                    await asyncio.to_thread(found.stop)
                await asyncio.to_thread(found.postgres.stop)


def port_of(upstream: FakeUpstream) -> int:
    return int(upstream.url.split(":")[2].split("/")[0])


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
async def test_a_full_disk_stops_no_process_and_no_call(stand: Stand) -> None:
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

    # What cannot start does not take the place of what serves.
    stand.supervisor.send_signal(signal.SIGHUP)

    async def told() -> bool:
        said = log_of(stand)
        return '"workers_not_replaced"' in said or '"workers_replaced"' in said

    await eventually(told)
    assert await answered(stand)

    # Who is killed is started again, on the same full disk.
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
    assert [(one["state"], one["last_exit"]) for one in workers] == [("up", -9)] * 2


@pytest.mark.timeout(240)
async def test_a_worker_that_ends_again_and_again_ends_nothing_else(
    stand: Stand,
) -> None:
    """Seven times, each soon after it has begun; readiness tells how often."""
    for _ in range(7):
        [*_, victim] = stand.processes("worker")
        victim.terminate()
        await asyncio.to_thread(psutil.wait_procs, [victim], 30)
        assert stand.supervisor.poll() is None
        await stand.ready()
    workers = (await readyz(stand))["workers"]
    assert sum(one["restarts"] for one in workers) == 7
    assert (await fetch(stand.admin, "/readyz")).status == 200


@pytest.mark.timeout(600)
async def test_readiness_says_when_nobody_takes_calls(stand: Stand) -> None:
    for process in stand.processes("worker"):
        # It keeps the supervisor from starting another in a moment: it ends for good, and slowly.
        process.suspend()
        process.send_signal(signal.SIGKILL)

    async def away() -> bool:
        return (await fetch(stand.admin, "/readyz")).status == 503

    await eventually(away)
    await stand.ready()
    assert (await readyz(stand))["status"] == "ready"


@pytest.mark.timeout(240)
async def test_a_disk_that_is_full_at_the_first_start_is_waited_for(tmp_path: Path) -> None:
    filling: list[Path] = []
    async with standing(tmp_path, lambda disk: filling.extend(fill(disk))) as stand:
        # More often than a process may end whose settings cannot work.
        await eventually(lambda: ended(stand, 6))
        assert stand.supervisor.poll() is None
        for path in filling:
            path.unlink()
        await stand.ready()
        assert await answered(stand)
        assert stand.supervisor.poll() is None


async def ended(stand: Stand, times: int) -> bool:
    return stand.supervisor.poll() is not None or log_of(stand).count('"child_ended"') >= times
