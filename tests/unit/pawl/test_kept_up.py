"""The supervisor's processes: started again with growing pauses, replaced once a new one is up."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import pawl.serving.process as kept
from pawl.serving.process import Child, NotReplaced, Running
from proxy.errors import DoesNotStart
from proxy.shared_memory import ProcessState, read_states, readiness, write_states

# Says that it is up unless the file `broken` is there; then it ends with status 3.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
# Under nohup(1) the tests ignore SIGHUP, and what they start inherits that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
folder, ready = Path(sys.argv[1]), int(sys.argv[3])
if (folder / "broken").exists():
    sys.exit(3)
os.write(ready, b"up")
os.close(ready)
time.sleep(60)
"""


class Kept:
    """A child, its states as they came, and what the supervisor would be told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[ProcessState] = []
        self._news = asyncio.Event()
        self.gave_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        command = [sys.executable, "-S", "-c", SCRIPT, str(folder)]
        self.child = Child("worker 0", command, (), self._changed, self.gave_up, stop_s=10.0)

    def _changed(self) -> None:
        self.seen.append(self.child.state)
        self._news.set()

    def broken(self, is_so: bool) -> None:
        file = self.folder / "broken"
        file.touch() if is_so else file.unlink()

    def pid(self) -> int:
        present = self.child._present
        assert present is not None
        return present.process.pid

    def end(self) -> None:
        os.kill(self.pid(), signal.SIGTERM)

    async def until(self, check: Callable[[ProcessState], bool]) -> None:
        async with asyncio.timeout(30):
            while not check(self.child.state):
                self._news.clear()
                await self._news.wait()

    async def up(self, restarts: int = 0) -> None:
        if not self.seen:
            await self.child.start()
        await self.until(lambda s: s.state == "up" and s.restarts == restarts)

    @property
    def pauses(self) -> list[float]:
        """How long each pause was: from "restarting" to the next state."""
        pairs = zip(self.seen, self.seen[1:], strict=False)
        return [b.since - a.since for a, b in pairs if a.state == "restarting"]


@pytest.fixture
async def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kept]:
    """A child with short pauses, which is stopped in the end."""
    monkeypatch.setattr(kept, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(kept, "LONGEST_PAUSE_S", 0.2)
    made = Kept(tmp_path)
    yield made
    await made.child.stop()


async def test_child_process_that_was_up_once_is_restarted_for_ever_with_growing_pauses(
    one: Kept,
) -> None:
    await one.up()
    one.broken(True)
    one.end()
    await one.until(lambda s: s.restarts == 12)
    assert not one.gave_up.done()
    assert one.child.state.last_exit == 3
    assert min(one.pauses[:3]) < 0.15
    assert min(one.pauses[5:]) >= 0.19
    one.broken(False)
    await one.until(lambda s: s.state == "up")
    await one.child.stop()
    assert one.child.state.state == "stopping"


async def test_healthy_time_of_a_child_process_shortens_its_restart_pauses(
    one: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "HEALTHY_S", 0.0)
    monkeypatch.setattr(kept, "LONGEST_PAUSE_S", 60.0)
    await one.child.start()
    for restarts in range(10):
        await one.up(restarts)
        one.end()
    await one.up(10)
    assert len(one.pauses) == 10
    # Doubled each time, the last would be ten seconds.
    assert one.pauses[-1] < 5


async def test_child_process_that_never_comes_up_is_given_up_at_its_first_start(one: Kept) -> None:
    one.broken(True)
    await one.child.start()
    with pytest.raises(
        DoesNotStart, match="worker 0 cannot start: it ended 5 times, with status 3"
    ):
        await asyncio.wait_for(one.gave_up, 30)


async def test_failed_replacement_leaves_the_old_child_process_up(one: Kept) -> None:
    await one.up()
    old = one.pid()
    one.broken(True)
    with pytest.raises(NotReplaced, match="did not come up: it ended with status 3"):
        await one.child.replace()
    assert one.pid() == old
    assert one.child.state.state == "up"
    one.broken(False)
    await one.child.replace()
    assert one.pid() != old
    assert one.child.state == ProcessState("worker 0", "up", one.child.state.since, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(old, 0)


async def test_old_child_process_that_ends_during_a_failed_replacement_is_restarted(
    one: Kept,
) -> None:
    await one.up()
    one.broken(True)
    replacing = asyncio.create_task(one.child.replace())
    os.kill(one.pid(), signal.SIGKILL)
    with pytest.raises(NotReplaced):
        await replacing
    one.broken(False)
    await one.until(lambda s: s.state == "up" and s.restarts > 0)


async def test_failed_spawn_of_a_child_process_is_tried_again(
    one: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    await one.up()
    good = one.child._command
    one.child._command = [str(one.folder / "nothing")]
    refused, spawn = asyncio.Event(), one.child._spawn

    async def noted() -> Running:
        try:
            return await spawn()
        except OSError:
            refused.set()
            raise

    monkeypatch.setattr(one.child, "_spawn", noted)
    one.end()
    await refused.wait()
    one.child._command = good
    await one.up(1)


async def test_stop_ends_the_pause_before_a_restart_at_once(one: Kept) -> None:
    await one.up()
    one.child._pause_s = 60.0
    one.end()
    await one.until(lambda s: s.state == "restarting")
    async with asyncio.timeout(30):
        await one.child.stop()


def test_proxy_is_ready_while_a_worker_is_up(tmp_path: Path) -> None:
    up = ProcessState("worker 0", "up", 1.0, 0)
    down = ProcessState("worker 1", "restarting", 1.0, 7, -7)
    write_states(tmp_path, [down, down, down])
    write_states(tmp_path, [up, down])
    assert read_states(tmp_path) == [up, down]
    ready, told = readiness(read_states(tmp_path))
    assert ready
    assert told[1] == {
        "name": "worker 1",
        "state": "restarting",
        "since": "1970-01-01T00:00:01Z",
        "restarts": 7,
        "last_exit": -7,
    }
    assert not readiness([down])[0]
    assert readiness(None) == (True, [])
