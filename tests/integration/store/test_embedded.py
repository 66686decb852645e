"""The embedded PostgreSQL: its owner, those who connect to it, and what is left of a crash."""

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import asyncpg
import psutil
import pytest
from structlog.testing import capture_logs

from pawl.database import keep_postgres_running
from proxy.lookup import Lookup
from store import embedded
from store.database import is_unavailable
from store.embedded import EmbeddedPostgres
from store.errors import StoreError
from tests.conftest import ROOT, copy_cluster
from tests.integration.conftest import settings_for
from tests.support.waiting import eventually, until_true

AT_ONCE = 4
# Asks for the server, uses it until a line comes, and ends as a command does.
USER = """
import asyncio, sys
from pathlib import Path
import asyncpg
from store.embedded import EmbeddedPostgres

async def use(url):
    connection = await asyncpg.connect(url)
    assert await connection.fetchval("SELECT 1") == 1
    print("up", flush=True)
    sys.stdin.readline()

postgres = EmbeddedPostgres(Path(sys.argv[1]))
try:
    asyncio.run(use(postgres.ensure_running()))
finally:
    postgres.stop()
"""


def user(folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", USER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def await_up(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "up\n", process.stderr.read()[-2000:]


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process of PostgreSQL's, or its guard, that has to do with a folder under `folder`."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            named = process.name() in ("initdb", "postgres", "sh", "sleep")
            if named and (str(folder) in process.cwd() or str(folder) in str(process.cmdline())):
                found.append(process)
    return found


@contextmanager
def slow(folder: Path, *, stopped_s: float, running_s: float) -> Iterator[None]:
    """PostgreSQL's processes get on as on a slow disk: they stand still most of the time."""
    over = threading.Event()

    def hold_up() -> None:
        while not over.is_set():
            held = processes_of(folder)
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
def folder() -> Iterator[Path]:
    """A data directory; nothing of PostgreSQL's is left running in it.

    It is not below pytest's own, which every pytest of this machine closes to other users.
    """
    with tempfile.TemporaryDirectory(prefix="embedded-") as name:
        yield Path(name)
        for process in processes_of(Path(name)):
            with suppress(psutil.Error):
                process.kill()
                process.wait(20)


@pytest.fixture
def made(folder: Path, migrated_cluster: Path) -> Path:
    """A data directory whose database was made by an earlier start."""
    copy_cluster(migrated_cluster, folder)
    return folder


@pytest.fixture
def postgres(made: Path) -> Iterator[EmbeddedPostgres]:
    """The server, owned by this process."""
    server = EmbeddedPostgres(made)
    server.ensure_running()
    yield server
    server.stop()


def kill(pid: int | None) -> None:
    """Kill a process, and wait until it is no longer one of this process's children."""
    assert pid is not None
    process = psutil.Process(pid)
    process.kill()
    process.wait(20)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("on_a_slow_disk", [False, True])
def test_commands_that_start_at_once_share_an_embedded_postgres(
    folder: Path, on_a_slow_disk: bool
) -> None:
    began = time.monotonic()
    users = [user(folder) for _ in range(AT_ONCE)]
    if on_a_slow_disk:
        with slow(folder, stopped_s=0.8, running_s=0.05):
            for process in users:
                await_up(process)
        assert time.monotonic() - began > 5
    else:
        for process in users:
            await_up(process)
    servers = [one for one in processes_of(folder) if "-D" in one.cmdline() and one.name() != "sh"]
    assert len(servers) == 1
    for process in users:
        process.communicate("\n", timeout=60)
    assert EmbeddedPostgres(folder).pid is None


def test_reading_command_makes_no_database_and_names_the_running_stack(made: Path) -> None:
    server, empty = EmbeddedPostgres(made), made / "other"
    with pytest.raises(StoreError, match=f"no database in {empty}"):
        EmbeddedPostgres(empty).check_initialised()
    try:
        server.ensure_running()
        server.check_initialised()
        assert server.folder in embedded.running_servers()
        command = [sys.executable, "-m", "pawl.cli", "policies", "list"]
        environment = {name: os.environ[name] for name in ("PATH",)}
        environment |= {"PAWL_DATA_DIR": str(empty), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, env=environment, cwd=made, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert f"no database in {empty}; the running stack's is in " in done.stderr
        assert str(made) in done.stderr
        assert not empty.exists()
    finally:
        server.stop()


async def test_postgres_ends_with_its_owner_process_and_the_next_user_starts_it_again(
    made: Path,
) -> None:
    owner, guest = EmbeddedPostgres(made), EmbeddedPostgres(made)
    url = owner.ensure_running()
    assert guest.ensure_running() == url
    guest.stop()
    assert owner.pid is not None
    connection = await asyncpg.connect(url)
    owner.stop()
    assert owner.pid is None
    with pytest.raises(asyncpg.PostgresError) as lost:
        await connection.fetchval("SELECT 1")
    assert is_unavailable(lost.value)
    assert guest.ensure_running() == url
    owner.ensure_running()
    owner.stop()
    assert guest.pid is not None
    guest.stop()
    assert guest.pid is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_postgres_process_is_left_after_the_owner_process_ends(
    made: Path, number: signal.Signals
) -> None:
    owner = user(made)
    await_up(owner)
    owner.send_signal(number)
    owner.communicate(timeout=60)
    until_true(lambda: not processes_of(made))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_hung_postgres_is_stopped_hard_after_its_owner_process_was_killed(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "SERVE", embedded.SERVE.replace("seq 30", "seq 2"))
    monkeypatch.setattr(embedded, "STOP_S", 1)
    postgres = EmbeddedPostgres(made)
    postgres.ensure_running()
    assert postgres.pid is not None
    server = psutil.Process(postgres.pid)
    checkpointer = next(one for one in server.children() if "checkpointer" in one.cmdline()[0])
    # No ordinary shutdown can end without it.
    checkpointer.suspend()
    with pytest.raises(StoreError, match="did not stop in time"):
        postgres.stop()
    until_true(lambda: not processes_of(made))


def test_postgres_with_killed_owner_and_guard_process_is_replaced_by_the_next_user(
    made: Path,
) -> None:
    owner = user(made)
    await_up(owner)
    left = EmbeddedPostgres(made).pid
    for process in processes_of(made):
        with suppress(psutil.Error):
            if process.name() == "sh":
                process.kill()
    owner.kill()
    owner.communicate()
    assert EmbeddedPostgres(made).pid == left
    postgres = EmbeddedPostgres(made)
    postgres.ensure_running()
    assert postgres.pid != left
    postgres.stop()


def test_database_left_half_made_by_a_killed_first_start_is_made_anew(folder: Path) -> None:
    with slow(folder, stopped_s=0.9, running_s=0.1):
        first = user(folder)
        until_true(lambda: any(process.name() == "initdb" for process in processes_of(folder)))
        first.kill()
        first.communicate()
    second = user(folder)
    await_up(second)
    second.communicate("\n")
    assert [path.name for path in folder.glob("postgres*/")] == ["postgres"]


@pytest.fixture
def unreaped() -> Iterator[int]:
    """The id of a process that has ended, and whose parent does not take note of it."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    until_true(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    yield process.pid
    process.wait()


@pytest.mark.parametrize("is_recycled", [True, False])
def test_killed_postgres_is_started_again_though_its_process_id_is_taken(
    made: Path, unreaped: int, is_recycled: bool
) -> None:
    """Its id is that of another process, or of a killed server that nobody reaps."""
    taken = os.getpid() if is_recycled else unreaped
    first = EmbeddedPostgres(made)
    first.ensure_running()
    kill(first.pid)
    first.stop()
    for name in ("postmaster.pid", ".s.PGSQL.5432.lock"):
        file = made / "postgres" / name
        lines = file.read_text().splitlines()
        lines[0] = str(taken)
        file.write_text("\n".join(lines) + "\n")
    (made / "postgres.owner").write_text(f"{taken}\n")
    postgres = EmbeddedPostgres(made)
    assert postgres.pid is None
    postgres.ensure_running()
    assert postgres.pid not in (None, taken)
    postgres.stop()


def test_start_of_postgres_waits_for_the_last_process_of_a_killed_server(
    postgres: EmbeddedPostgres,
) -> None:
    assert postgres.pid is not None
    backend = psutil.Process(postgres.pid).children()[0]
    backend.suspend()
    kill(postgres.pid)
    with pytest.raises(StoreError, match="not ready yet"):
        postgres.ensure_running(within_s=1.0)
    backend.kill()
    postgres.ensure_running()
    assert postgres.pid is not None


def test_failed_start_of_postgres_is_reported_with_its_reason(postgres: EmbeddedPostgres) -> None:
    postgres.stop()
    with (postgres.folder / "postgresql.conf").open("a") as file:
        file.write("no_such_setting = 1\n")
    with pytest.raises(StoreError, match=r"did not start.*no_such_setting"):
        postgres.ensure_running()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("is_first", [True, False])
def test_full_disk_at_the_start_of_postgres_is_reported_and_leaves_nothing_half_done(
    folder: Path, is_first: bool
) -> None:
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=80m", "none", disk], check=False
    ).returncode:
        pytest.skip("may not mount a file system")
    try:
        postgres = EmbeddedPostgres(disk)
        if not is_first:
            postgres.ensure_running()
            postgres.stop()
        with suppress(OSError):
            while True:
                with (disk / "filler").open("ab") as filler:
                    filler.write(b"\0" * 4096)
        with pytest.raises(StoreError, match=r"did not start.*No space left on device"):
            postgres.ensure_running()
        assert not list(disk.glob("postgres.new-*"))
        (disk / "filler").unlink()
        postgres.ensure_running()
        postgres.stop()
    finally:
        # A guard may be about to leave.
        until_true(lambda: not subprocess.run(["umount", disk], check=False).returncode)


@pytest.mark.skipif(os.geteuid() != 0, reason="the server has another user")
def test_folders_outside_of_the_data_directory_keep_their_permissions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of PostgreSQL's programs too, as in an environment below /root."""
    programs, installed = EmbeddedPostgres(folder).programs, folder / "installed"
    for part in (programs.parent, Path(f"{programs.parents[1]}.libs")):
        shutil.copytree(part, installed / part.relative_to(programs.parents[2]))
    own = installed / programs.relative_to(programs.parents[2])
    monkeypatch.setattr(EmbeddedPostgres, "programs", own)
    above, data_dir = folder / "above", folder / "above" / "var"
    data_dir.mkdir(parents=True)
    for closed in (folder, above, data_dir, installed, own.parent / "share"):
        closed.chmod(0o700)

    server = EmbeddedPostgres(data_dir)
    copied = embedded._path_in_tmp(server.folder, "-programs")
    try:
        assert server.ensure_running() == server.url
        assert server.folder in embedded.running_servers()

        for closed in (folder, above, data_dir, installed, own.parent / "share"):
            assert stat.filemode(closed.stat().st_mode) == "drwx------"
        assert copied.stat().st_uid == os.geteuid()
        assert not copied.stat().st_mode & 0o022
    finally:
        server.stop()
        shutil.rmtree(copied, ignore_errors=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_database_folder_of_another_user_is_refused(postgres: EmbeddedPostgres) -> None:
    postgres.stop()
    os.chown(postgres.folder, 12345, 12345)
    with pytest.raises(StoreError, match="belongs to another user; set PAWL_DATA_DIR"):
        postgres.ensure_running()


def test_start_of_postgres_that_takes_too_long_is_reported_and_goes_on(
    postgres: EmbeddedPostgres,
) -> None:
    postgres.stop()
    with pytest.raises(StoreError, match="not ready yet"):
        postgres.ensure_running(within_s=0)
    assert postgres.ensure_running(within_s=30)


def test_postgres_is_stopped_although_its_folder_was_closed_to_its_user(
    postgres: EmbeddedPostgres,
) -> None:
    # As programs do that want temporary folders for themselves.
    postgres.folder.parent.chmod(0o700)
    postgres.stop()
    assert postgres.pid is None


async def test_postgres_starts_in_a_folder_too_long_for_a_socket_path(folder: Path) -> None:
    postgres = EmbeddedPostgres(folder / ("long" * 25))
    connection = await asyncpg.connect(postgres.ensure_running())
    assert await connection.fetchval("SELECT 1") == 1
    await connection.close()
    postgres.stop()


async def test_stacks_postgres_is_stopped_at_any_moment_of_its_watch(made: Path) -> None:
    """At any moment of a look, also one that starts the server again."""
    for round_ in range(6):
        async with keep_postgres_running(made) as postgres:
            assert postgres.pid is not None
            connection = await asyncpg.connect(postgres.url)
            assert await connection.fetchval("SELECT 1") == 1
            await connection.close()
            if round_ % 2:
                os.kill(postgres.pid, signal.SIGKILL)
            await asyncio.sleep(0.45 + 0.03 * round_)
        assert postgres.pid is None


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["command", "in a script"])
def interrupts(request: pytest.FixtureRequest) -> Iterator[None]:
    """How this process takes SIGINT: a shell's script has it ignored by what it starts with `&`."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
async def test_cancelled_start_of_the_stack_leaves_no_postgres(folder: Path) -> None:
    async def run() -> None:
        async with keep_postgres_running(folder):
            raise AssertionError("it was cancelled before")

    running = asyncio.create_task(run())
    await asyncio.to_thread(until_true, lambda: processes_of(folder))
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert EmbeddedPostgres(folder).pid is None


async def test_worker_queries_postgres_once_it_runs_and_does_not_log_its_absence(
    folder: Path,
) -> None:
    lookup = Lookup(settings_for(None, "http://127.0.0.1:9/v1", folder))
    server = EmbeddedPostgres(folder)

    async def is_answered() -> bool:
        return await lookup.ask(lambda driver: driver.fetchval("SELECT 1"), within_s=60) == 1

    with capture_logs() as logs:
        assert not await is_answered()
    assert logs == []
    await asyncio.to_thread(server.ensure_running)
    await eventually(is_answered)
    lookup.close()
    await asyncio.to_thread(server.stop)
