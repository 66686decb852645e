"""Measure the looks of trainer and proxy at versions where there were many, and episodes wait.

A ledger with 10,000 versions, of which the last 64 are retired and have their files, and
`--waiting` episodes of these that wait, each of two calls. The looks: which versions can be asked
for (a proxy, twice a second), which need a slot (once a second), and whose files nothing can ask
for any more (after each update), where nobody calls any more and where half of the episodes were
called lately. Medians of five, in milliseconds, once where all calls have log-probabilities, and
once where a hundredth has none and the version is still needed for them.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from benchmarks.backlog import CLAIMABLE, timed
from store.adapter_slots import live_versions
from store.connection.engine import make_engine
from store.embedded.server import EmbeddedPostgres
from store.schema.migrate import upgrade
from store.schema.partitions import ensure_partition
from store.version_queries import unasked_versions, versions_with_files
from store.version_states import ensure_base

VERSIONS: Final = 10_000
WITH_FILES: Final = 64
CALLS: Final = 2
IDLE_S: Final = 60.0
# As long ago as half of 100,000 episodes had their last call.
LATELY_S: Final = 560.0
TABLES: Final = "episodes, episode_policies, transitions, policies, updates"
_VERSIONS: Final = """
    WITH made AS (
        INSERT INTO updates (id, policy, parent_version, version, state, recipe, claimed_at)
        SELECT uuidv7(), 'm', 0, v, 'done', '{}', now() - make_interval(secs => :count - v + 3600)
        FROM generate_series(1, CAST(:count AS integer)) v RETURNING id, version)
    INSERT INTO policies (name, version, state, served_name, adapter_path, update_id, changed_at,
        files_deleted_at)
    SELECT 'm', version, CASE version WHEN :count THEN 'serving' ELSE 'retired' END,
        'm@' || version, '/a', id, now() - interval '1 hour',
        CASE WHEN version < :count - :kept THEN now() END
    FROM made
"""
_EPISODES: Final = """
    INSERT INTO episodes (id, key, method, task, task_named, policy, policy_version,
        first_call_id, last_call_id, last_call_at, scored_at, reward)
    SELECT id, 'w' || n, 'header', 't' || n / 8, true, 'm', :newest - 1 - n % :kept, id, id,
        now() - make_interval(secs => 61 + n * 0.01), now(), n % 2
    FROM (SELECT n, uuidv7() AS id FROM generate_series(1, CAST(:count AS integer)) n) made
"""
_CALLS: Final = """
    INSERT INTO transitions (id, episode_id, method, confidence, agent, dialect, policy,
        policy_version, status, http_status, stream, request, reply, prompt_ids, sampled_ids,
        sampled_logprobs, sampling, trainable, tool_calls, started_at, total_ms, retry, split)
    SELECT uuidv7(e.last_call_at - now()), e.id, 'header', 'certain', 'default', 'chat', 'm',
        e.policy_version, 'complete', 200, false, CAST(repeat(md5(e.key), 20) AS bytea), '{}',
        CAST(repeat('p', 480) AS bytea), CAST(repeat('s', 80) AS bytea),
        CAST(repeat('l', 80) AS bytea), '{"temperature": 1.0}', true, '[]',
        e.last_call_at, 1, 0, 'train'
    FROM episodes e, generate_series(1, CAST(:calls AS integer)) call
"""
_TAKE_LOGPROBS: Final = """
    UPDATE transitions SET sampled_logprobs = ''
    FROM episodes e WHERE e.id = episode_id AND CAST(substr(e.key, 2) AS integer) % 100 = 0
"""


async def fill(connection: AsyncConnection, waiting: int) -> None:
    """Store the versions, the episodes and their calls."""
    await ensure_base(connection, "m")
    await connection.execute(text("UPDATE policies SET state = 'published'"))
    kept = {"count": VERSIONS, "kept": WITH_FILES}
    await connection.execute(text(_VERSIONS), kept)
    episodes = {"count": waiting, "newest": VERSIONS, "kept": WITH_FILES}
    await connection.execute(text(_EPISODES), episodes)
    await connection.execute(text(CLAIMABLE), {"tag": "w", "policies": ["m"]})
    # A thousand seconds and a minute ago the first episode ended: maybe that was yesterday.
    today = datetime.now(UTC).date()
    for day in (today - timedelta(days=1), today):
        await ensure_partition(connection, day)
    await connection.execute(text(_CALLS), {"calls": CALLS})


async def looked(engine: AsyncEngine, what: str) -> list[tuple[str, float]]:
    """Return the looks' milliseconds, once what autovacuum does is done."""
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.execute(text(f"VACUUM ANALYZE {TABLES}"))
    async with engine.connect() as connection:
        found = len(await unasked_versions(connection, "m", {VERSIONS}, IDLE_S))
    known = await timed(engine, versions_with_files)
    slots = await timed(engine, lambda c: live_versions(c, "m", 10.0, 3600.0))
    files = await timed(engine, lambda c: unasked_versions(c, "m", {VERSIONS}, IDLE_S))
    called = await timed(engine, lambda c: unasked_versions(c, "m", {VERSIONS}, LATELY_S))
    return [
        (f"{what}: versions that can be asked for", known),
        (f"{what}: versions that need a slot", slots),
        (f"{what}: files that may go, of {found} of {WITH_FILES} versions", files),
        (f"{what}: the same, where half of the episodes were called lately", called),
    ]


async def measure(waiting: int) -> list[tuple[str, float]]:
    """Measure all, on a PostgreSQL of its own."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedPostgres(Path(folder))
        url = server.ensure_running()
        await upgrade(url)
        engine = make_engine(url)
        try:
            async with engine.begin() as connection:
                await fill(connection, waiting)
            found = await looked(engine, "all have log-probabilities")
            async with engine.begin() as connection:
                await connection.execute(text(_TAKE_LOGPROBS))
            return [*found, *await looked(engine, "a hundredth has none")]
        finally:
            await engine.dispose()
            server.stop()


def show(found: Sequence[tuple[str, float]], waiting: int) -> None:
    """Print the table."""
    table = Table("look", "ms", title=f"{VERSIONS:,} versions, {waiting:,} episodes wait")
    for name, milliseconds in found:
        table.add_row(name, f"{milliseconds:.1f}")
    Console().print(table)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--waiting", type=int, default=100_000)
    options: Any = parser.parse_args()
    show(asyncio.run(measure(options.waiting)), options.waiting)


if __name__ == "__main__":
    main()
