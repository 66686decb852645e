"""The backup that docs/howto/operate.md describes, as a drill: taken under load, and restored."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import Result
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner

from pawl.cli import app
from pawl.commands.policy_files import find_faults
from pawl.commands.spool import view_spool
from proxy.ingester.ingester import run_ingester
from store.claims import begin_update
from store.database import make_engine
from store.embedded import EmbeddedPostgres
from store.version_states import add_version, ensure_base
from tests.conftest import ROOT
from tests.integration.conftest import Proxy, settings_for
from tests.support.waiting import awaited
from trainer.publishing.adapters import SERVED_FILES, NewVersion, write_version

CALLERS = 4
# Calls of each caller before the backup begins, and at least as many while it is taken.
ENOUGH = 15


class Load:
    """Callers that call and give rewards until they are told to stop."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._stopping = False
        # Calls that were answered, and episodes whose reward was.
        self.calls: list[str] = []
        self.rewarded: list[str] = []

    async def call(self, caller: int) -> None:
        """Call and give rewards, one after the other."""
        number = 0
        while not self._stopping:
            number += 1
            key = f"{caller}-{number}"
            reply = await self._proxy.chat(f"/episode/{key}")
            assert reply.status == 200
            self.calls.append(reply.headers["x-pawl-call"])
            status, _ = await self._proxy.feedback({"episode": key, "value": 1.0})
            assert status in (200, 202)
            self.rewarded.append(key)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all callers while the context is open."""
        callers = [asyncio.create_task(self.call(caller)) for caller in range(CALLERS)]
        try:
            yield
        finally:
            self._stopping = True
            await asyncio.gather(*callers)

    async def reaches(self, calls: int) -> None:
        """Wait until there were so many calls."""

        async def made() -> int:
            return len(self.calls)

        assert await awaited(made, lambda number: number >= calls) >= calls


def copied(folder: Path, copy: Path) -> None:
    """Copy a folder that changes meanwhile, again until nothing vanished in between."""
    copying = ["cp", "-a", str(folder), str(copy)]
    while subprocess.run(copying, stderr=subprocess.DEVNULL, check=False).returncode:
        shutil.rmtree(copy, ignore_errors=True)


def run(server: EmbeddedPostgres, program: str, *arguments: str) -> None:
    """Run one of PostgreSQL's own programs."""
    command = [str(server.programs / program), *arguments]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.fixture
async def restored(tmp_path: Path) -> AsyncIterator[EmbeddedPostgres]:
    """A fresh server, whose database is empty."""
    server = EmbeddedPostgres(tmp_path / "restored")
    await asyncio.to_thread(server.ensure_running)
    yield server
    await asyncio.to_thread(server.stop)


async def test_each_call_and_reward_answered_before_a_backup_is_restored_once(
    proxy: Proxy,
    postgres: EmbeddedPostgres,
    database_url: str,
    restored: EmbeddedPostgres,
    tmp_path: Path,
) -> None:
    (tmp_path / "elsewhere").mkdir()
    spool, dump = tmp_path / "elsewhere" / "spool", tmp_path / "pawl.dump"
    load = Load(proxy)
    async with load.running():
        await load.reaches(CALLERS * ENOUGH)
        calls, rewarded = list(load.calls), list(load.rewarded)
        # In the order of the guide: the spool, then the database.
        await asyncio.to_thread(copied, proxy.settings.spool_dir, spool)
        await asyncio.to_thread(
            run, postgres, "pg_dump", "--format=custom", f"--file={dump}", database_url
        )
        await load.reaches(len(calls) + ENOUGH)
    await asyncio.to_thread(
        run, restored, "pg_restore", "--no-owner", f"--dbname={restored.url}", str(dump)
    )
    for mark in spool.glob("*/*.at"):
        mark.unlink()
    settings = settings_for(restored.url, "http://127.0.0.1:9/v1", tmp_path / "elsewhere")
    engine = make_engine(restored.url)

    async def missing() -> list[str]:
        async with engine.connect() as connection:
            stored = (await connection.execute(text("SELECT id::text FROM transitions"))).scalars()
            left = set(calls) - set(stored)
            query = "SELECT target, count(*) FROM feedback WHERE episode_id IS NOT NULL GROUP BY 1"
            said = {row[0]: row[1] for row in await connection.execute(text(query))}
        assert set(said.values()) <= {1}
        return sorted(left | (set(rewarded) - said.keys()))

    async with run_ingester(settings):
        assert await awaited(missing, lambda names: not names) == []

        async def waiting() -> int:
            return view_spool(settings.spool_dir).records

        assert await awaited(waiting, lambda records: not records) == 0
    async with engine.connect() as connection:
        scored = await connection.scalar(
            text("SELECT count(*) FROM episodes WHERE scored_at IS NOT NULL")
        )
    assert scored >= len(rewarded)
    await engine.dispose()


async def version(engine: AsyncEngine, root: Path, number: int) -> Path:
    """Write and record a version, as an update does."""

    def save(folder: Path) -> None:
        for name in SERVED_FILES:
            (folder / name).write_text(f"{name} of {number}")

    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        update_id = await begin_update(connection, "m", number - 1, {})
        new = NewVersion(
            policy="m",
            version=number,
            update_id=update_id,
            parent_version=number - 1,
            outcomes=(),
            metrics={},
            probe=(),
        )
        folder = write_version(root, new, save)
        await add_version(connection, "m", number, str(folder), update_id)
        await connection.execute(
            text("UPDATE updates SET state = 'done', version = :version WHERE id = :id"),
            {"version": number, "id": update_id},
        )
    return folder


async def test_policies_check_reports_versions_with_missing_or_altered_files(
    engine: AsyncEngine, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.chdir(tmp_path)

    async def checked() -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, ["policies", "check", "--json"])

    folders = [await version(engine, tmp_path / "adapters", number) for number in (1, 2, 3, 4)]
    assert await find_faults(engine) == []
    assert (await checked()).exit_code == 0
    shutil.rmtree(folders[0])
    (folders[1] / SERVED_FILES[0]).write_text("other")
    (folders[2] / SERVED_FILES[0]).unlink()
    found = await find_faults(engine)
    assert [one.version for one in found] == ["m@1", "m@2", "m@3"]
    words = ("not there", "SHA-256", "not there")
    assert all(word in one.problem for word, one in zip(words, found, strict=True))
    done = await checked()
    assert (done.exit_code, done.stdout.count("\n")) == (1, 3)


def test_guide_backs_up_the_spool_then_the_database_then_the_adapters() -> None:
    guide = (ROOT / "docs/howto/operate.md").read_text()
    section = guide[guide.index("## Backup and restore") :]
    places = [section.index(word) for word in ("cp -a", "pg_dump", "PAWL_ADAPTER_DIR")]
    assert places == sorted(places)
