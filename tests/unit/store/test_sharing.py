"""File locks between processes: turns, users, and a process that is killed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from store.embedded.sharing import Wait, take_turn, try_to_hold
from store.errors import StoreError

HOLDER = """
import sys, time
from pathlib import Path
from store.embedded.sharing import try_to_hold
held = try_to_hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def never() -> bool:
    return False


def test_one_holds_or_several_share(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    first, second = try_to_hold(file, shared=True), try_to_hold(file, shared=True)
    assert first is not None
    assert second is not None
    assert try_to_hold(file) is None
    first.release()
    assert try_to_hold(file) is None
    second.release()
    alone = try_to_hold(file)
    assert alone is not None
    assert try_to_hold(file, shared=True) is None
    alone.release()


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert try_to_hold(file) is None
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        held = take_turn(file, Wait(5.0, never), "nobody")
        held.release()


def test_a_wait_ends_in_time_and_says_for_what(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    held = try_to_hold(file)
    assert held is not None
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"gave up waiting for the other one after 0\.2 s"):
        take_turn(file, Wait(0.2, never), "the other one")
    assert 0.2 <= time.monotonic() - began < 30
    with pytest.raises(StoreError, match="told to stop"):
        take_turn(file, Wait(60.0, lambda: True), "the other one")
    held.release()
