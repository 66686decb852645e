"""Processes that start, use and stop one embedded PostgreSQL, all at once and on a slow machine."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import asyncpg
import psutil
import pytest

from pawl.stack.database import kept_postgres
from store.embedded.cluster import Cluster
from store.embedded.server import EmbeddedPostgres
from store.errors import StoreError
from tests.support.waiting import until_true

AT_ONCE = 6
# One connection for as long as it works: a server that is stopped or killed meanwhile is seen. On
# a busy machine that is longer, until it has asked a few times.
COMMAND = """
import asyncio, json, sys, time
from pathlib import Path
import asyncpg
from pawl.stack.database import open_database
from store.settings import StoreSettings

async def main(folder, work_s):
    began = time.monotonic()
    async with open_database(StoreSettings(data_dir=Path(folder), DATABASE_URL=None)) as url:
        ready = time.monotonic()
        connection = await asyncpg.connect(url)
        asked = 0
        while time.monotonic() < ready + work_s or asked < 4:
            await connection.execute("SELECT 1")
            asked += 1
            await asyncio.sleep(0.02)
        await connection.close()
    print(json.dumps({"ready_s": ready - began, "asked": asked}))

asyncio.run(main(sys.argv[1], float(sys.argv[2])))
"""
USER = """
import sys, time
from pathlib import Path
from store.embedded.server import EmbeddedPostgres
EmbeddedPostgres(Path(sys.argv[1])).ensure_running()
print("up", flush=True)
time.sleep(60)
"""


def command(folder: Path, work_s: float) -> "subprocess.Popen[str]":
    """A command like `pawl export`: the database is opened, used and let go of."""
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(folder), str(work_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process: "subprocess.Popen[str]") -> dict[str, float]:
    """What a command said; fails with its last words."""
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err[-2000:]
    found: dict[str, float] = json.loads(out)
    return found


@contextmanager
def user(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that uses the server until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", USER, str(folder)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def of_postgres(folder: Path) -> list[psutil.Process]:
    """Every process of PostgreSQL's that works on a folder under `folder`."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            named = process.name() in ("initdb", "postgres", "pg_ctl")
            if named and (str(folder) in process.cwd() or str(folder) in str(process.cmdline())):
                found.append(process)
    return found


@contextmanager
def slow(folder: Path, *, stopped_s: float, running_s: float) -> Iterator[None]:
    """PostgreSQL's processes get on as on a slow disk: they stand still most of the time.

    That holds up initdb, each start and each shutdown alike, with nothing put in their place.
    """
    over = threading.Event()

    def hold_up() -> None:
        while not over.is_set():
            held = of_postgres(folder)
            for process in held:
                with suppress(psutil.Error):
                    process.suspend()
            over.wait(stopped_s if held else running_s)
            for process in held:
                with suppress(psutil.Error):
                    process.resume()
            over.wait(running_s)

    thread = threading.Thread(target=hold_up)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A data directory; nothing of PostgreSQL's is left running in it."""
    yield tmp_path
    for process in of_postgres(tmp_path):
        with suppress(psutil.Error):
            process.kill()


def test_six_at_once_on_a_fresh_folder_all_get_the_server(folder: Path) -> None:
    for _ in range(2):
        for found in [outcome(one) for one in [command(folder, 0.3) for _ in range(AT_ONCE)]]:
            assert found["asked"] > 3
        # The last one stopped it: nobody said that it is needed any longer.
        assert not EmbeddedPostgres(folder).is_running


@pytest.mark.timeout(180)
def test_six_at_once_on_a_slow_disk_wait_for_each_other(folder: Path) -> None:
    with slow(folder, stopped_s=0.9, running_s=0.05):
        commands = [command(folder, 0.1 * number) for number in range(AT_ONCE)]
        found = [outcome(one) for one in commands]
    # Slower than any of a server's programs would be given by its package: ten seconds.
    assert max(one["ready_s"] for one in found) > 5
    assert all(one["asked"] for one in found)
    assert not EmbeddedPostgres(folder).is_running


def test_a_command_stops_no_server_that_another_process_uses(folder: Path) -> None:
    first = command(folder, 3.0)
    until_true(lambda: EmbeddedPostgres(folder).is_running)
    with user(folder):
        assert outcome(first)["asked"] > 3
        assert EmbeddedPostgres(folder).is_running
        outcome(command(folder, 0))
        assert EmbeddedPostgres(folder).is_running


def test_who_is_killed_is_no_user_any_more(folder: Path) -> None:
    postgres = EmbeddedPostgres(folder)
    postgres.ensure_running()
    with user(folder) as other:
        postgres.stop()
        # It uses it still.
        assert postgres.is_running
        other.kill()
        other.wait()
        postgres.ensure_running()
        postgres.stop()
    assert not postgres.is_running


def test_the_last_user_stops_what_is_not_needed_any_longer(folder: Path) -> None:
    first, second = EmbeddedPostgres(folder), EmbeddedPostgres(folder)
    first.ensure_running()
    second.ensure_running()
    first.stop()
    assert second.is_running
    second.leave()
    assert not second.is_running


def test_a_server_outlives_users_who_only_leave(folder: Path) -> None:
    first, second = EmbeddedPostgres(folder), EmbeddedPostgres(folder)
    first.ensure_running()
    first.leave()
    assert first.is_running
    # A command that finds it running leaves it running.
    second.ensure_running(passing=True)
    second.leave()
    assert second.is_running
    first.ensure_running()
    first.stop()


def test_a_first_start_that_was_killed_is_made_anew(folder: Path) -> None:
    with slow(folder, stopped_s=0.9, running_s=0.1):
        first = command(folder, 0)
        until_true(lambda: any(process.name() == "initdb" for process in of_postgres(folder)))
        first.kill()
        first.communicate()
    assert outcome(command(folder, 0))["asked"]
    assert sorted(path.name for path in folder.glob("postgres*/")) == ["postgres"]


def test_a_killed_server_is_started_again_though_another_process_has_its_id(folder: Path) -> None:
    postgres = EmbeddedPostgres(folder)
    postgres.ensure_running()
    assert postgres.pid is not None
    killed = psutil.Process(postgres.pid)
    killed.kill()
    killed.wait(20)
    # As in a container, where ids begin at 1 with each start.
    for name in ("postmaster.pid", ".s.PGSQL.5432.lock"):
        file = folder / "postgres" / name
        lines = file.read_text().splitlines()
        lines[0] = str(os.getpid())
        file.write_text("\n".join(lines) + "\n")
    assert not postgres.is_running
    postgres.ensure_running()
    assert postgres.pid != os.getpid()
    postgres.stop()


def test_a_server_that_cannot_start_is_told_with_its_reason(folder: Path) -> None:
    postgres = EmbeddedPostgres(folder)
    postgres.ensure_running()
    postgres.stop()
    with (folder / "postgres" / "postgresql.conf").open("a") as file:
        file.write("no_such_setting = 1\n")
    with pytest.raises(StoreError, match=r"did not start.*no_such_setting"):
        postgres.ensure_running()


def test_a_start_that_takes_too_long_kills_nothing_and_goes_on(folder: Path) -> None:
    postgres = EmbeddedPostgres(folder)
    postgres.ensure_running()
    postgres.stop()
    with slow(folder, stopped_s=2.9, running_s=0.02), pytest.raises(StoreError, match="gave up"):
        postgres.ensure_running(within_s=0.05)
    assert postgres.ensure_running(within_s=30)
    postgres.stop()


def test_a_server_is_stopped_although_its_folder_was_closed_to_its_user(folder: Path) -> None:
    postgres = EmbeddedPostgres(folder)
    postgres.ensure_running()
    # As programs do that want temporary folders for themselves.
    folder.chmod(0o700)
    postgres.stop()
    assert not postgres.is_running


def test_a_server_that_does_not_stop_is_told_with_the_reason(folder: Path) -> None:
    postgres = EmbeddedPostgres(folder)
    postgres.ensure_running()
    assert postgres.pid is not None
    server = psutil.Process(postgres.pid)
    server.suspend()
    try:
        with pytest.raises(StoreError, match=r"did not stop within 1 s.*server does not shut down"):
            Cluster(folder / "postgres").stop(1.0)
    finally:
        server.resume()
    server.wait(60)


async def test_the_stack_s_database_is_stopped_while_it_is_watched(folder: Path) -> None:
    """At any moment of a look, also one that starts the server again."""
    for round_ in range(8):
        async with kept_postgres(folder) as postgres:
            assert postgres.pid is not None
            connection = await asyncpg.connect(postgres.url)
            assert await connection.fetchval("SELECT 1") == 1
            await connection.close()
            if round_ % 2:
                os.kill(postgres.pid, signal.SIGKILL)
            await asyncio.sleep(0.45 + 0.03 * round_)
        assert not postgres.is_running
