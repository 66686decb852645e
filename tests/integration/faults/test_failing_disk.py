"""A worker's disk that fails or hangs: who waits is answered, and the worker recovers."""

import asyncio
import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.ingester.drain import Drainer
from proxy.spool import recorder as recording
from proxy.spool.recorder import Recorder, Spool
from proxy.spool.segments import encode_frame
from store.read.episodes import episode_ids, read_episodes
from tests.support.faults.counters import assert_adds_up, ledger
from tests.support.faults.ledger import Scrapes, kept, scrape
from tests.support.faults.stand import Stand
from tests.support.records import captured
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.servers.raw_upstream import post, raw_ask
from tests.support.waiting import eventually, until

EIO = OSError(errno.EIO, "Input/output error")
# What a commit needs of the disk, and what comes after one that failed.
CALLS = ["write", "fdatasync", "ftruncate", "close", "open", "fstat", "fsync", "rename", "unlink"]


class Failing:
    """Has calls of the writer's thread fail, and counts in `refused` how often they did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.refused: Counter[str] = Counter()

    def __call__(self, *names: str, error: BaseException = EIO) -> Callable[[], None]:
        """Have these calls fail; what is returned mends them."""
        broken = threading.Event()
        broken.set()

        def make(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                if broken.is_set() and threading.current_thread().name == "pawl-spool":
                    self.refused[name] += 1
                    raise error
                return real(*args, **more)

            return call

        for name in names:
            where = Path if name in ("rename", "unlink") else os
            self._monkeypatch.setattr(where, name, make(name, getattr(where, name)))
        return broken.clear


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


async def answered(spool: Spool, episode: str) -> bool:
    return await asyncio.wait_for(spool.append(encode_frame(captured(episode))), 5)


@pytest.mark.parametrize("names", [[name] for name in CALLS] + [CALLS], ids="+".join)
@pytest.mark.parametrize("begun", [False, True])
async def test_whatever_the_disk_refuses_who_waits_is_answered_and_the_next_is_stored(
    engine: AsyncEngine, tmp_path: Path, failing: Failing, names: list[str], begun: bool
) -> None:
    spool = Spool(tmp_path / "0", segment_bytes=600)
    if begun:
        assert await answered(spool, "first")
    mend = failing(*names)
    said = [await answered(spool, f"e{number}") for number in range(3)]
    mend()
    assert await answered(spool, "later")
    await asyncio.to_thread(spool.close)
    drainer = Drainer(tmp_path, lambda: engine, batch=10)
    while await drainer.drain_once():
        pass
    async with engine.connect() as connection:
        found = {e.key for e in await read_episodes(connection, await episode_ids(connection))}
    acknowledged = {f"e{number}" for number in range(3) if said[number]}
    assert {"later", *acknowledged, *(["first"] if begun else [])} <= found
    await drainer.count()
    assert not list(tmp_path.glob("*/*.open"))
    assert_adds_up()


@pytest.mark.parametrize("error", [RuntimeError("odd"), MemoryError(), ValueError("v")])
async def test_an_error_of_another_kind_is_an_answer_too(
    tmp_path: Path, failing: Failing, error: Exception
) -> None:
    spool = Spool(tmp_path / "0", segment_bytes=2**20)
    mend = failing("write", error=error)
    assert not await answered(spool, "a")
    mend()
    assert await answered(spool, "b")
    spool.close()


async def test_whoever_counts_may_fail_and_all_that_wait_are_answered(tmp_path: Path) -> None:
    def broken(_outcome: str, _marks: list[str]) -> None:
        raise OSError(28, "No space left on device")

    spool = Spool(tmp_path / "0", segment_bytes=2**20, on_commit=broken)
    assert await answered(spool, "a")
    assert await answered(spool, "b")
    spool.close()


def test_the_writer_outlives_the_loop_that_waited(tmp_path: Path) -> None:
    async def leave() -> Spool:
        spool = Spool(tmp_path / "0", segment_bytes=2**20)
        spool.append(encode_frame(captured()))
        await asyncio.sleep(0)
        return spool

    spool = asyncio.run(leave())
    spool.close()
    assert not spool._thread.is_alive()
    assert len(list(tmp_path.glob("0/*.seg"))) == 1


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that answers no sync until the event is set."""
    go_on, real = threading.Event(), os.fdatasync

    def fdatasync(handle: int) -> None:
        go_on.wait(20)
        real(handle)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return go_on


async def test_a_disk_that_hangs_is_given_up_and_used_again_once_it_answers(
    tmp_path: Path, hanging: threading.Event
) -> None:
    told: list[tuple[str, list[str]]] = []
    spool = Spool(
        tmp_path / "0",
        segment_bytes=2**20,
        on_commit=lambda outcome, marks: told.append((outcome, marks)),
        patience_s=0.3,
    )
    frame = encode_frame(captured())
    first = spool.append(frame, "first")
    # Its commit has begun then; a wait of any length might let the disk be given up before.
    await asyncio.sleep(0)
    second = spool.append(frame, "second")
    assert [await asyncio.wait_for(f, 10) for f in (first, second)] == [False, False]
    # Nothing is gathered for a disk that does not answer.
    assert spool.append(frame, "third").result() is False
    assert told == [("lost", ["first", "second"]), ("lost", ["third"])]
    hanging.set()

    async def again() -> bool:
        return await spool.append(frame, "later")

    assert await eventually(again)
    # What was told as lost is not told again as written.
    assert [marks for outcome, marks in told if outcome == "durable"] == [[], ["later"]]
    assert spool.under_way_s() == 0
    spool.close()


async def test_a_spool_closes_though_its_disk_hangs(
    tmp_path: Path, hanging: threading.Event
) -> None:
    spool = Spool(tmp_path / "0", segment_bytes=2**20, patience_s=0.2)
    spool.append(encode_frame(captured()))
    began = time.monotonic()
    await spool.flush()
    spool.close(within_s=0.5)
    assert time.monotonic() - began < 10
    hanging.set()
    spool._thread.join(5)


async def test_an_episode_that_misses_a_record_is_marked_though_no_call_comes_after(
    engine: AsyncEngine, tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "RETRY_S", 0.05)
    before = ledger()["pawl_records_dropped_total"]
    recorder = Recorder(tmp_path, segment_bytes=2**20)
    assert await recorder.take(captured("e", total_ms=1.0))
    mend = failing("write", "ftruncate")
    assert not await recorder.take(captured("e"))
    # It tries to tell of it, again and again.
    await until(lambda: failing.refused["write"] >= 4)
    mend()
    drainer = Drainer(tmp_path, lambda: engine, batch=10)

    async def marked() -> bool:
        await drainer.drain_once()
        async with engine.connect() as connection:
            found = await read_episodes(connection, await episode_ids(connection))
        return any("lost" in (episode.quarantined_reason or "") for episode in found)

    assert await eventually(marked)
    # The attempts to tell of it were no records.
    assert ledger()["pawl_records_dropped_total"] == before + 1
    await recorder.close()
    while await drainer.drain_once():
        pass
    await drainer.count()
    assert_adds_up()


async def test_a_record_that_cannot_be_encoded_is_dropped_and_counted(tmp_path: Path) -> None:
    before = ledger()["pawl_records_dropped_total"]
    recorder = Recorder(tmp_path, segment_bytes=2**20)
    assert not await recorder.take(captured("\ud800"))
    assert await recorder.take(captured("e"))
    assert ledger()["pawl_records_dropped_total"] == before + 1
    await recorder.close()


# As it runs

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
    """A proxy of which the worker's disk does what a file says."""
    control, code = tmp_path / "faults", tmp_path / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(FAULTS)
    control.write_text("")
    monkeypatch.setenv("DISK_FAULTS", str(control))
    paths = [str(code), os.environ.get("PYTHONPATH", ""), str(Path.cwd())]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    port = int(upstream.url.split(":")[2].split("/")[0])
    stand = await asyncio.to_thread(Stand, tmp_path, port, 1)
    await stand.ready()
    yield stand, control
    if stand.supervisor.poll() is None:
        stand.supervisor.kill()
        stand.supervisor.wait()
    await asyncio.to_thread(stand.postgres.stop)


CHAT = post("/v1/chat/completions", b'{"model":"m","messages":[{"role":"user","content":"q"}]}')


async def ask(stand: Stand) -> str:
    """A call's id; the answer has come."""
    reply = await asyncio.wait_for(raw_ask(stand.port, CHAT), 30)
    head = reply.partition(b"\r\n\r\n")[0]
    assert head.startswith(b"HTTP/1.1 200"), head
    [call] = [line[12:] for line in head.split(b"\r\n") if line.lower().startswith(b"x-pawl-call:")]
    return call.strip().decode()


@pytest.mark.timeout(600)
async def test_a_proxy_serves_on_through_io_errors_and_recovers_by_itself(
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

    async def all_kept() -> bool:
        return (await kept(stand.url, calls, own_episodes=False)).missing == 0

    await eventually(all_kept)
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
async def test_a_proxy_of_which_the_disk_hangs_answers_and_ends(
    faulty: tuple[Stand, Path],
) -> None:
    stand, control = faulty
    await ask(stand)
    control.write_text("hang")
    began = time.monotonic()
    waiting = asyncio.create_task(ask(stand))

    async def shown() -> bool:
        found = await scrape(stand.admin, Scrapes())
        return found is not None and found["pawl_spool_commit_seconds"] > 1

    await eventually(shown)
    await waiting
    assert time.monotonic() - began > 5
    # From now on nobody waits for it.
    began = time.monotonic()
    await ask(stand)
    assert time.monotonic() - began < 10
    stand.supervisor.send_signal(signal.SIGTERM)
    await asyncio.to_thread(stand.supervisor.wait, 30)
    assert time.monotonic() - began < 40
