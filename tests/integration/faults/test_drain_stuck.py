"""A drain without progress is reported as stuck; while PostgreSQL is away it is waiting."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from proxy.ingester import batch_writer, drain
from proxy.ingester.drain import Drainer
from proxy.spool.segments import encode_frame
from store.database import make_engine
from store.ids import new_id
from store.selecting import select_episodes
from tests.conftest import Psql
from tests.integration.faults.conftest import Spooled
from tests.support.faults.counters import assert_adds_up, ledger
from tests.support.records import captured
from tests.support.waiting import eventually, until

LOOK_S = 0.02


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "RETRY_S", LOOK_S)
    monkeypatch.setattr(batch_writer, "UNANSWERED_RETRY_S", 0.5)


@pytest.fixture
async def limited(
    psql: Psql, database_url: str, engine: AsyncEngine
) -> AsyncIterator[tuple[str, str]]:
    """A role that owns all tables, and the database's URL for it."""
    role = f"limited_{uuid4().hex}"
    psql(f"CREATE ROLE {role} LOGIN")
    owned = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
    async with engine.begin() as connection:
        await connection.execute(text(f"ALTER SCHEMA public OWNER TO {role}"))
        for (table,) in await connection.execute(text(owned)):
            await connection.execute(text(f'ALTER TABLE "{table}" OWNER TO {role}'))
    url = make_url(database_url).set(username=role)
    yield role, url.render_as_string(hide_password=False)
    async with engine.begin() as connection:
        await connection.execute(text(f"REASSIGN OWNED BY {role} TO CURRENT_USER"))
        await connection.execute(text(f"DROP OWNED BY {role}"))
    psql(f"DROP ROLE {role}")


class Traffic:
    """A spool that gets a record at every look, and what its drain says at each."""

    def __init__(self, root: Path, engine: AsyncEngine) -> None:
        self.engine = engine
        self.drainer = Drainer(root, lambda: self.engine, batch=10)
        self._home = root / "0"
        self._home.mkdir()
        self.written = 0
        self.seen: list[tuple[str, float]] = []

    def write(self, episode: str = "") -> None:
        frame = encode_frame(captured(episode or f"e{self.written}"))
        (self._home / f"{new_id()}.seg").write_bytes(frame)
        self.written += 1

    async def flow(self, looks: int) -> None:
        for _ in range(looks):
            self.write()
            await asyncio.sleep(2 * LOOK_S)
            await self.drainer.count()
            progress = self.drainer.progress
            self.seen.append((progress.state, progress.stuck_s))

    @property
    def states(self) -> set[str]:
        states = {state for state, _ in self.seen}
        self.seen.clear()
        return states

    async def assert_moves(self) -> None:
        """Wait until all is stored."""
        await eventually(lambda: self.has_stored(self.written))
        await until(lambda: self.drainer.progress.state == "moving")
        await self.drainer.count()
        assert self.drainer.progress.held == 0
        assert REGISTRY.get_sample_value("pawl_drain_stuck_seconds") == 0
        assert_adds_up()

    async def has_stored(self, episodes: int) -> bool:
        async with self.engine.connect() as connection:
            return len(await select_episodes(connection)) == episodes

    async def holds_one(self) -> bool:
        await self.drainer.count()
        return self.drainer.progress.held == 1


@asynccontextmanager
async def draining(root: Path, engine: AsyncEngine) -> AsyncIterator[Traffic]:
    """Drain a spool until the context is left; no record is a dead letter."""
    traffic = Traffic(root, engine)
    task = asyncio.create_task(traffic.drainer.run())
    try:
        yield traffic
    finally:
        traffic.drainer.stop_after_batch()
        await task
        await traffic.engine.dispose()
    assert not list(root.glob("dead/*"))


def assert_ever_longer(seen: list[tuple[str, float]]) -> None:
    assert {state for state, _ in seen} == {"stuck"}
    for_s = [seconds for _, seconds in seen]
    assert for_s == sorted(for_s)


async def test_drain_without_insert_privilege_is_reported_as_stuck_until_it_is_granted(
    limited: tuple[str, str], engine: AsyncEngine, tmp_path: Path
) -> None:
    role, url = limited
    async with engine.begin() as connection:
        await connection.execute(text(f"REVOKE INSERT ON transitions FROM {role}"))
    async with draining(tmp_path, make_engine(url)) as traffic:
        await traffic.flow(2)
        await until(lambda: traffic.drainer.progress.state == "stuck")
        traffic.seen.clear()
        await traffic.flow(20)
        assert_ever_longer(traffic.seen)
        assert not list(tmp_path.glob("dead/*"))
        assert (REGISTRY.get_sample_value("pawl_drain_stuck_seconds") or 0) >= 20 * LOOK_S
        async with engine.begin() as connection:
            await connection.execute(text(f"GRANT INSERT ON transitions TO {role}"))
        await traffic.assert_moves()


async def test_no_record_is_lost_while_the_database_role_may_not_log_in(
    limited: tuple[str, str], psql: Psql, tmp_path: Path
) -> None:
    role, url = limited
    psql(f"ALTER ROLE {role} NOLOGIN")
    async with draining(tmp_path, make_engine(url)) as traffic:
        await traffic.flow(2)
        await until(lambda: traffic.drainer.progress.state == "stuck")
        psql(f"ALTER ROLE {role} LOGIN")
        await traffic.assert_moves()


async def test_drain_is_stuck_on_a_held_record_while_others_are_stored(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long it has been held must not begin anew with each record that is stored."""
    fails = True

    async def store(self: object, engine: AsyncEngine, records: list[object]) -> frozenset[UUID]:
        if fails and any(getattr(record, "episode", None) == "huge" for record in records):
            raise TimeoutError
        return await real(self, engine, records)  # type: ignore[arg-type]

    real = batch_writer.Ingester.store
    monkeypatch.setattr(batch_writer.Ingester, "store", store)
    monkeypatch.setattr(batch_writer, "UNANSWERED_RETRY_S", 0.05)
    async with draining(tmp_path, engine) as traffic:
        traffic.write("huge")
        await eventually(traffic.holds_one)
        await until(lambda: traffic.drainer.progress.state == "stuck")
        await traffic.flow(20)
        assert_ever_longer(traffic.seen)
        await eventually(lambda: traffic.has_stored(traffic.written - 1))
        fails = False
        await traffic.assert_moves()


async def test_drain_waits_for_a_read_only_database_before_it_is_reported_as_stuck(
    limited: tuple[str, str],
    psql: Psql,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    role, url = limited
    psql(f"ALTER ROLE {role} SET default_transaction_read_only = on")
    async with draining(tmp_path, make_engine(url)) as traffic:
        traffic.write()
        await until(lambda: traffic.drainer.progress.state == "waiting")
        monkeypatch.setattr(batch_writer, "MOST_READ_ONLY_FAILURES", 10**9)
        await traffic.flow(20)
        assert traffic.states == {"waiting"}
        assert traffic.drainer.progress.held == 0
        # It does not end.
        monkeypatch.setattr(batch_writer, "MOST_READ_ONLY_FAILURES", 20)
        await until(lambda: traffic.drainer.progress.state == "stuck")
        psql(f"ALTER ROLE {role} RESET ALL")
        # Not `dispose`: a connection that is in use at that moment would never be closed.
        psql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'")
        await traffic.assert_moves()


async def test_drain_waits_for_postgres_however_long_and_blames_no_record(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    away = make_engine("postgresql://nobody@127.0.0.1:1/none")
    async with draining(tmp_path, away) as traffic:
        await traffic.flow(20)
        assert traffic.states <= {"waiting", "moving"}
        assert traffic.drainer.progress.state == "waiting"
        assert not traffic.drainer._writer.one_by_one
        traffic.engine = engine
        await away.dispose()
        await traffic.assert_moves()


async def has_waiters(connection: AsyncConnection) -> bool:
    waiting = "SELECT FROM pg_locks WHERE NOT granted AND relation = 'episodes'::regclass"
    return bool(await connection.scalar(text(f"SELECT EXISTS ({waiting})")))


async def test_counting_of_spooled_records_does_not_wait_for_a_blocked_batch(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "COUNT_WAIT_S", 0.1)
    async with draining(tmp_path, engine) as traffic:
        async with engine.begin() as locking:
            await locking.execute(text("LOCK TABLE episodes"))
            traffic.write()
            await eventually(lambda: has_waiters(locking))
            await asyncio.wait_for(traffic.drainer.count(), 10)
            assert await has_waiters(locking)
        await traffic.assert_moves()


async def test_record_counters_add_up_while_a_drain_is_blocked(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker's records of the turn are stored, and another's wait for a lock."""
    monkeypatch.setattr(drain, "COUNT_WAIT_S", 0.1)
    spooled.write(captured("locked"))
    await spooled.drain()
    async with spooled.engine.begin() as locking:
        await locking.execute(text("SELECT FROM episodes FOR UPDATE"))
        spooled.write(captured("free"))
        locked = spooled.write(captured("locked"))
        (spooled.folder / "1").mkdir()
        locked.rename(spooled.folder / "1" / locked.name)
        before = ledger()["pawl_records_stored_total"]
        turn = asyncio.create_task(spooled.drainer.drain_once())
        await until(lambda: ledger()["pawl_records_stored_total"] == before + 1)
        await spooled.drainer.count()
        assert ledger()["pawl_records_spooled"] == 1
        assert_adds_up()
    await turn
