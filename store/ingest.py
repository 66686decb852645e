"""From spooled records to rows: one transaction a batch, and one more where things meet.

Order-free and repeatable (DESIGN §3.5): every row carries the id it was born with, an
episode's fields are merged by rules that do not depend on what came first, and what refers
to something that is not there yet (feedback, a call that repeats another's reply) is
settled whenever it arrives. The first transaction writes a batch's rows; only the second,
`store.settle`, looks at what others wrote. By then both sides of whatever meets are
committed, and the later of two drainers sees them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any
from uuid import UUID

import asyncpg
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.away import is_away
from store.bases import Bases
from store.errors import Refused
from store.partitions import days_of, ensure_partition
from store.records import CallRecord, SpoolRecord
from store.settle import meets_others, settle
from store.write import key_conflicts, write


class Ingester:
    """Stores the batches of one drainer; remembers what they may be stored as additions to."""

    def __init__(self, on_conflicts: Callable[[list[UUID]], None] | None = None) -> None:
        """`on_conflicts` is told of feedback whose idempotency key another body had: both count."""
        self._on_conflicts = on_conflicts
        self._bases = Bases()
        self._days: set[date] = set()

    async def store(self, engine: AsyncEngine, records: Sequence[SpoolRecord]) -> None:
        """Store `records`, all or none; those that are stored already change nothing.

        What is raised leaves the batch to be stored again, whole or in halves.

        Raises:
            Refused: the database refuses a record.
            Exception: the database is away (see `store.away`), or nobody expected it: it may be a
                record's fault, or everybody's.
        """
        with _refusals():
            await self._store(engine, records)

    async def _store(self, engine: AsyncEngine, records: Sequence[SpoolRecord]) -> None:
        days = set(days_of(record.id for record in records if isinstance(record, CallRecord)))
        for repeated in (False, True):
            await self._make_partitions(engine, days)
            try:
                async with engine.connect() as connection:
                    await self._store_on(await _driver_of(connection), records, repeated)
                return
            except (asyncpg.UniqueViolationError, asyncpg.CheckViolationError):
                # Some were stored before, or a day was dropped with all it held: both are rare.
                if repeated:
                    raise
                self._days.clear()
                self._bases = Bases()

    async def _store_on(self, driver: Any, records: Sequence[SpoolRecord], repeated: bool) -> None:
        batch = self._bases.batch()
        async with driver.transaction():
            written = await write(driver, records, batch, repeated=repeated)
        batch.commit()
        conflicts = await key_conflicts(driver, written)
        if conflicts and self._on_conflicts is not None:
            self._on_conflicts(conflicts)
        if await meets_others(driver, written):
            async with driver.transaction():
                await settle(driver, written)

    async def _make_partitions(self, engine: AsyncEngine, days: set[date]) -> None:
        # In a transaction of their own: no drainer that waits for one holds rows meanwhile.
        for day in sorted(days - self._days):
            async with engine.begin() as connection:
                await ensure_partition(connection, day)
            self._days.add(day)


async def ingest(connection: AsyncConnection, records: Sequence[SpoolRecord]) -> None:
    """Store `records` in the caller's transaction: for one writer, now and then.

    Raises:
        Refused: the database refuses a record.
        Exception: the database is away (see `store.away`).
    """
    with _refusals():
        await _ingest(connection, records)


async def _ingest(connection: AsyncConnection, records: Sequence[SpoolRecord]) -> None:
    for day in days_of(record.id for record in records if isinstance(record, CallRecord)):
        await ensure_partition(connection, day)
    # SQLAlchemy begins its transaction with its first statement.
    await connection.execute(text("SELECT 1"))
    driver = await _driver_of(connection)
    written = await write(driver, records, Bases().batch(), repeated=True)
    await settle(driver, written)


@contextmanager
def _refusals() -> Iterator[None]:
    """What the driver raises where it is given what the database does not take, as `Refused`."""
    try:
        yield
    except (
        asyncpg.PostgresError,
        asyncpg.InterfaceError,
        SQLAlchemyError,
        ArithmeticError,
        ValueError,
    ) as error:
        # What PostgreSQL calls an error of its own (a damaged index, say) is no record's fault yet.
        if is_away(error) or isinstance(error, asyncpg.InternalServerError):
            raise
        raise Refused(str(error)) from error


async def _driver_of(connection: AsyncConnection) -> Any:
    return (await connection.get_raw_connection()).driver_connection


async def known_targets(
    connection: AsyncConnection, targets: Iterable[tuple[str, str]]
) -> set[tuple[str, str]]:
    """Which of these (kind, target) pairs are stored already."""
    found: set[tuple[str, str]] = set()
    queries = {
        "episode": "SELECT key FROM episodes WHERE key = ANY(:wanted)",
        "response": "SELECT response_id FROM transitions WHERE response_id = ANY(:wanted)",
        "call": "SELECT id::text FROM transitions WHERE id = ANY(CAST(:wanted AS uuid[]))",
    }
    by_kind: dict[str, list[str]] = {}
    for kind, target in targets:
        by_kind.setdefault(kind, []).append(target)
    for kind, wanted in by_kind.items():
        rows = await connection.execute(text(queries[kind]), {"wanted": wanted})
        found.update((kind, row[0]) for row in rows)
    return found
