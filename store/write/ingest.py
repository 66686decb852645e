"""Ingest spooled records: one transaction per batch, and a second where records meet.

Storing is idempotent and independent of order: every row has the id that its record was made
with, an episode's fields are merged by rules that commute, and a reference to something that
is not stored yet (feedback, a call that repeats another's reply) is resolved whenever its
target arrives (docs/decisions/001-order-free-ledger.md).

The first transaction writes a batch's rows. Only the second (`store.link.settle`) reads what other
drainers wrote. By then both sides of a reference are committed, so the later of two drainers
sees them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any
from uuid import UUID

import asyncpg
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.database import driver_of, is_no_records_fault
from store.errors import Refused
from store.ids import days_of
from store.link.settle import meets_others, settle, settle_lapses
from store.records import CallRecord, SpoolRecord
from store.schema.partitions import ensure_partition
from store.tombstones import admit
from store.write.bases import Bases
from store.write.batches import key_conflicts, write
from store.write.rows import QuestionOf, no_question


class Ingester:
    """Store the batches of one drainer, and cache the calls that later ones may add to."""

    def __init__(
        self,
        on_conflicts: Callable[[list[UUID]], None] | None = None,
        on_late: Callable[[Mapping[str, int]], None] | None = None,
        question_of: QuestionOf = no_question,
    ) -> None:
        """Store what is told of the records, and what reads the question of a call.

        Args:
            on_conflicts: gets the ids of feedback requests whose idempotency key was stored with
                another body; the feedback of both bodies counts.
            on_late: gets how many statements came after their episode was trained on, by policy.
            question_of: reads what a call asks, by which episodes without a task's name are
                grouped. It is asked of the calls only that an episode's task may come from.
        """
        self._on_conflicts = on_conflicts
        self._on_late = on_late
        self._question_of = question_of
        self._bases = Bases()
        self._days: set[date] = set()
        # The last deletion before which the calls in `_bases` were stored.
        self._deletion = 0

    async def store(self, engine: AsyncEngine, records: Sequence[SpoolRecord]) -> frozenset[UUID]:
        """Store all `records` or none; those that are stored already change nothing.

        Return the ids of those that were left out, because they are about deleted episodes only, or
        calls of days that were dropped.
        After any error the batch may be stored again, whole or in halves.

        Raises:
            Refused: the database refuses a record.
            Exception: the database takes no record now
                (`store.database.is_no_records_fault` tells), or the error is
                unexpected: one record may be at fault, or none.
        """
        with _refusals():
            return await self._store(engine, records)

    async def _store(self, engine: AsyncEngine, records: Sequence[SpoolRecord]) -> frozenset[UUID]:
        days = _days(records)
        for repeated in (False, True):
            await self._make_partitions(engine, days)
            try:
                async with engine.connect() as connection:
                    return await self._store_on(await _driver_of(connection), records, repeated)
            except (asyncpg.UniqueViolationError, asyncpg.CheckViolationError):
                # Some records are stored already, or a day's partition was dropped. Both are
                # rare, so it is looked for only now.
                if repeated:
                    raise
                self._days.clear()
                self._bases = Bases()
        raise AssertionError("unreachable: the second try returns or raises")

    async def _store_on(
        self, driver: Any, records: Sequence[SpoolRecord], repeated: bool
    ) -> frozenset[UUID]:
        async with driver.transaction():
            admitted = await admit(driver, records)
            if admitted.deletion != self._deletion:
                # A call that another adds to may be gone.
                self._bases, self._deletion = Bases(), admitted.deletion
            batch = self._bases.batch()
            written = await write(
                driver, admitted.records, batch, self._question_of, repeated=repeated
            )
        batch.commit()
        conflicts = await key_conflicts(driver, written)
        if conflicts and self._on_conflicts is not None:
            self._on_conflicts(conflicts)
        if await meets_others(driver, written):
            async with driver.transaction():
                late = await settle(driver, written)
            if late and self._on_late is not None:
                self._on_late(late)
        # One that lasted for days has the episodes of days: batches of others are stored between.
        more = bool(written.lapses)
        while more:
            async with driver.transaction():
                more = await settle_lapses(driver, written.lapses)
        return admitted.left_out

    async def _make_partitions(self, engine: AsyncEngine, days: set[date]) -> None:
        # In a transaction of their own, so that no drainer holds row locks while it waits here.
        for day in sorted(days - self._days):
            async with engine.begin() as connection:
                await ensure_partition(connection, day)
            self._days.add(day)


def _days(records: Sequence[SpoolRecord]) -> set[date]:
    """Return the days (UTC) of the calls among `records`."""
    return set(days_of([record.id for record in records if isinstance(record, CallRecord)]))


async def ingest(connection: AsyncConnection, records: Sequence[SpoolRecord]) -> None:
    """Store `records` in the caller's transaction, for a single writer and few records.

    Raises:
        Refused: the database refuses a record.
        Exception: the database takes no record now
            (`store.database.is_no_records_fault` tells), or the error is unexpected.
    """
    with _refusals():
        await _ingest(connection, records)


async def _ingest(connection: AsyncConnection, records: Sequence[SpoolRecord]) -> None:
    for day in sorted(_days(records)):
        await ensure_partition(connection, day)
    driver = await driver_of(connection)
    admitted = await admit(driver, records)
    written = await write(driver, admitted.records, Bases().batch(), repeated=True)
    await settle(driver, written)
    while written.lapses and await settle_lapses(driver, written.lapses):
        pass


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn errors about a record's content into `Refused`; let all others pass.

    Raises:
        Refused: the database or its driver does not accept a record.
    """
    try:
        yield
    except (
        asyncpg.PostgresError,
        asyncpg.InterfaceError,
        SQLAlchemyError,
        ArithmeticError,
        ValueError,
    ) as error:
        # An internal error of PostgreSQL (a damaged index, for example) is not a record's fault.
        if is_no_records_fault(error) or isinstance(error, asyncpg.InternalServerError):
            raise
        raise Refused(str(error)) from error


async def _driver_of(connection: AsyncConnection) -> Any:
    return (await connection.get_raw_connection()).driver_connection
