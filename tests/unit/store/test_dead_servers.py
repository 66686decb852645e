"""The lock file of a server that was killed, and keeps its process id for a while."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.embedded import cluster
from store.embedded.cluster import Cluster
from tests.support.waiting import until_true


@pytest.fixture
def dead() -> Iterator[int]:
    """The id of a process that has ended, and whose parent does not take note of it."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    until_true(lambda: cluster._has_ended(process.pid))
    yield process.pid
    process.wait()


@pytest.fixture
def lock(tmp_path: Path, dead: int) -> Path:
    file = tmp_path / "postmaster.pid"
    file.write_text(f"{dead}\n{tmp_path}\n")
    return file


def test_the_lock_of_one_that_is_never_reaped_is_removed(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "REAPED_S", 0.1)
    Cluster(lock.parent)._forget_stale()
    assert not lock.exists()


@pytest.mark.parametrize("linked", [False, True])
def test_the_lock_stays_while_a_backend_works_in_the_folder(
    lock: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    monkeypatch.setattr(cluster, "REAPED_S", 0.1)
    folder = lock.parent
    if linked:
        folder = lock.parent.with_name(f"{lock.parent.name}-link")
        folder.symlink_to(lock.parent)
    with subprocess.Popen(["sleep", "60"], cwd=lock.parent) as backend:
        Cluster(folder)._forget_stale()
        assert lock.exists()
        backend.kill()


def test_a_parent_that_is_late_is_waited_for() -> None:
    # The parent takes note of its child's end after a while, and not before it says so.
    code = (
        "import os, sys, time\n"
        "child = os.fork()\n"
        "if not child: os._exit(0)\n"
        "print(child, flush=True)\n"
        "time.sleep(0.5)\n"
        "os.waitpid(child, 0)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    until_true(lambda: cluster._has_ended(child))
    cluster._await_reaped(child, time.monotonic() + 5)
    assert not Path(f"/proc/{child}").exists()
    parent.communicate()
