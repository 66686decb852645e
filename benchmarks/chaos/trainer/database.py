"""Keep one PostgreSQL under the trainers of several policies."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from benchmarks.chaos.postgres import kill_and_start
from benchmarks.chaos.trainer.forks import GONE_S
from store.embedded import EmbeddedPostgres


class Database:
    """Keep a PostgreSQL that one run may kill under all trainers, while no run counts on it."""

    def __init__(self, postgres: EmbeddedPostgres) -> None:
        self._postgres = postgres
        self._counting_on_it = 0
        self._changed = threading.Condition()

    @contextmanager
    def up(self) -> Iterator[None]:
        """Let nobody kill it within this block."""
        with self._changed:
            self._counting_on_it += 1
        try:
            yield
        finally:
            with self._changed:
                self._counting_on_it -= 1
                self._changed.notify_all()

    def kill_and_start(self) -> None:
        """Kill it and start it again; who would count on it waits so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._counting_on_it)
            asyncio.run(kill_and_start(self._postgres))

    def create(self, name: str) -> str:
        """Create an empty database, and return its URL."""
        asyncio.run(_create(self._postgres.url.replace("/pawl?", "/postgres?"), name))
        return self._postgres.url.replace("/pawl?", f"/{name}?")


async def _create(admin_url: str, name: str) -> None:
    connection = await asyncpg.connect(admin_url, timeout=GONE_S)
    try:
        await connection.execute(f"CREATE DATABASE {name}")
    finally:
        await connection.close()
