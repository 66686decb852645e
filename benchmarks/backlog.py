"""Measure what a claim costs while many episodes wait, and storing beside it.

A ledger with a history (300,000 consumed episodes), and a backlog of `--waiting` episodes in
seven shapes. For each: the look at what is ready (once a second where there is too little for
an update), a whole claim, and a look for what can never be trained; medians, in milliseconds.
With `--policies N` each episode, consumed or waiting, has calls of N policies, of which the first
claims. Nine of ten episodes came with one API key, and stand before the others in the order of
claims; with `--most-of-key` no more than this share of an update may come from one. Then batches of
calls are stored, alone and while claims are made and given back all the time.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from store.connection.engine import async_url, make_engine
from store.embedded.server import EmbeddedPostgres
from store.schema.migrate import upgrade
from store.updates.choice import find_ready
from store.updates.claims import claim, release
from store.updates.expiry import expire
from store.updates.ready import ClaimRule
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.support.records import call

TABLES = "episodes, episode_policies, updates, consumptions"
HISTORY = 300_000
PER_UPDATE = 128
VERSIONS = 40
OLDEST = VERSIONS - 4
TIMES = 5
GROUPS = ClaimRule(
    policy="m",
    group_size=8,
    groups=16,
    smallest_group=2,
    max_age_s=600.0,
    max_staleness=4,
    max_episode_age_s=86_400.0,
    failed_after_s=60.0,
    failed_reward=0.0,
    needs_spread=True,
)
SINGLES = ClaimRule(
    policy="m",
    group_size=1,
    groups=128,
    smallest_group=1,
    max_age_s=600.0,
    max_staleness=4,
    max_episode_age_s=86_400.0,
)
CALLS = msgspec.structs.replace(GROUPS, call_rewards_after_s=60.0, needs_spread=False)
# Shape: the rule, episodes a task (0: all of one task), and whether they are scored or failed. In
# one of three groups all are rewarded alike.
SHAPES: dict[str, tuple[ClaimRule, int, str]] = {
    "groups of 8": (GROUPS, 8, "scored"),
    "no two of a task": (GROUPS, 1, "scored"),
    "all of one task": (GROUPS, 0, "scored"),
    "groups of one": (SINGLES, 1, "scored"),
    "failed, unscored": (GROUPS, 8, "failed"),
    "scored by call": (CALLS, 8, "call scored"),
    "unscored": (GROUPS, 8, "open"),
}
EPISODES = """
    INSERT INTO episodes (id, key, method, task, task_named, policy, policy_version,
        api_key, first_call_id, last_call_id, last_call_at, failed, scored_at,
        call_scored_at, reward)
    SELECT id, CAST(:tag AS text) || n, 'header',
        'prompt:' || md5(CAST(:tag AS text) || n / CAST(:per_task AS integer)), false, 'm',
        CAST(:version AS integer) + n % 4,
        CASE WHEN n * 10 <= CAST(:count AS integer) * 9 THEN 'flood' ELSE 'calm' END,
        id, id, now() - make_interval(secs => n * 0.01 + 61),
        :state = 'failed', CASE WHEN :state = 'scored' THEN now() END,
        CASE WHEN :state = 'call scored' THEN now() - interval '61 s' END,
        CASE WHEN :state = 'scored' THEN n % 2 * sign(n / CAST(:per_task AS integer) % 3) END
    FROM (SELECT n, uuidv7() AS id FROM generate_series(1, CAST(:count AS integer)) n) made
"""
CLAIMABLE = """
    INSERT INTO episode_policies (episode_id, policy, own_version, own_latest, version, latest,
        task, api_key, scored_at, call_scored_at, reward, failed, last_call_at, claimable)
    SELECT id, name, policy_version, policy_version, policy_version, policy_version,
        task, api_key, scored_at, call_scored_at, reward, failed, last_call_at, true
    FROM episodes CROSS JOIN unnest(CAST(:policies AS text[])) AS name
    WHERE key LIKE CAST(:tag AS text) || '%'
"""
EMPTY = (
    "DELETE FROM episode_policies WHERE claimed_by IS NULL",
    "DELETE FROM episodes e WHERE NOT EXISTS"
    " (SELECT FROM episode_policies p WHERE p.episode_id = e.id)",
)
UPDATES = """
    INSERT INTO updates (id, policy, parent_version, version, state, recipe, claimed_at)
    SELECT uuidv7(), :policy, 0, CASE WHEN n <= :versions THEN n END, 'done', '{}',
        now() - make_interval(secs => :count + 1 - n)
    FROM generate_series(1, CAST(:count AS integer)) n
"""
VERSIONS_MADE = """
    INSERT INTO policies (name, version, state, served_name, adapter_path, update_id)
    SELECT policy, version, CASE version WHEN :newest THEN 'serving' ELSE 'retired' END,
        policy || '@' || version, '/a', id
    FROM updates WHERE version IS NOT NULL
"""
SPEND = f"""
    UPDATE episode_policies p SET claimed_by = u.id
    FROM (SELECT id, policy, row_number() OVER (PARTITION BY policy ORDER BY claimed_at) - 1 AS n
          FROM updates) u, episodes e
    WHERE e.id = p.episode_id AND e.key LIKE 'h%' AND u.policy = p.policy
        AND u.n = CAST(substr(e.key, 2) AS integer) / {PER_UPDATE}
"""


async def fill_history(connection: AsyncConnection, policies: Sequence[str]) -> None:
    """Store updates, versions, and the episodes that they consumed."""
    for policy in policies:
        await ensure_base(connection, policy)
        values = {"policy": policy, "count": HISTORY // PER_UPDATE + 1, "versions": VERSIONS}
        await connection.execute(text(UPDATES), values)
    await connection.execute(text("UPDATE policies SET state = 'published'"))
    await connection.execute(text(VERSIONS_MADE), {"newest": VERSIONS})
    await fill(connection, policies, "h", HISTORY, 8, "scored")
    await connection.execute(text(SPEND))
    await connection.execute(
        text(
            "INSERT INTO consumptions (episode_id, policy, update_id, trained)"
            " SELECT episode_id, policy, claimed_by, true FROM episode_policies"
            " WHERE claimed_by IS NOT NULL"
        )
    )


async def fill(
    connection: AsyncConnection,
    policies: Sequence[str],
    tag: str,
    count: int,
    per_task: int,
    state: str,
) -> None:
    """Store episodes of the newest four versions, each with a row for each policy."""
    values = {"tag": tag, "count": count, "per_task": per_task or count + 1, "state": state}
    await connection.execute(text(EPISODES), values | {"version": VERSIONS - 3})
    await connection.execute(text(CLAIMABLE), {"tag": tag, "policies": list(policies)})


async def settled(engine: AsyncEngine) -> None:
    """Do what autovacuum would have done by now."""
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.execute(text(f"VACUUM ANALYZE {TABLES}"))


Work = Callable[[AsyncConnection], Awaitable[Any]]


async def timed(engine: AsyncEngine, work: Work) -> float:
    """Return the median milliseconds of `work` in a transaction that is undone."""
    found = []
    for _ in range(TIMES):
        async with engine.connect() as connection:
            await connection.execute(text("SELECT 1"))
            started = time.perf_counter()
            await work(connection)
            found.append(1000 * (time.perf_counter() - started))
            await connection.rollback()
    return median(found)


async def prepare_shape(
    engine: AsyncEngine, policies: Sequence[str], shape: str, waiting: int
) -> None:
    """Let only episodes of this shape wait."""
    _, per_task, state = SHAPES[shape]
    async with engine.begin() as connection:
        for statement in EMPTY:
            await connection.execute(text(statement))
        await fill(connection, policies, "w", waiting, per_task, state)
    await settled(engine)


async def measure_shape(engine: AsyncEngine, shape: str, most_of_key: float) -> dict[str, Any]:
    """Measure one line of the table."""
    rule = msgspec.structs.replace(SHAPES[shape][0], most_of_key=most_of_key)
    async with engine.connect() as connection:
        taken = len(await find_ready(connection, rule, OLDEST))
    return {
        "shape": shape,
        "taken": taken,
        "look_ms": await timed(engine, lambda c: find_ready(c, rule, OLDEST)),
        "claim_ms": await timed(engine, lambda c: claim(c, rule, VERSIONS, {})),
        "expire_ms": await timed(engine, lambda c: expire(c, rule, VERSIONS, {})),
    }


async def measure_storing(engine: AsyncEngine, batches: int) -> list[float]:
    """Return the sorted milliseconds that batches of 50 calls took to be stored."""
    ingester = Ingester()
    found = []
    for number in range(batches):
        calls = [call(f"{time.time_ns()}-{number}-{n}", task="new") for n in range(50)]
        started = time.perf_counter()
        await ingester.store(engine, calls)
        found.append(1000 * (time.perf_counter() - started))
    return sorted(found)


async def claim_and_release(engine: AsyncEngine) -> None:
    """Claim groups and give them back, until cancelled."""
    while True:
        async with engine.begin() as connection:
            update_id = await claim(connection, GROUPS, VERSIONS, {})
        assert update_id is not None
        async with engine.begin() as connection:
            await release(connection, update_id, "measured")


async def measure(
    waiting: int, batches: int, policies: Sequence[str], most_of_key: float
) -> dict[str, Any]:
    """Measure everything, on a PostgreSQL of its own."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedPostgres(Path(folder))
        url = server.ensure_running()
        await upgrade(url)
        engine = make_engine(url)
        # A history takes longer than the store lets a statement take.
        patient = create_async_engine(async_url(url))
        try:
            async with patient.begin() as connection:
                await fill_history(connection, policies)
            shapes = []
            for shape in SHAPES:
                await prepare_shape(patient, policies, shape, waiting)
                shapes.append(await measure_shape(engine, shape, most_of_key))
            await prepare_shape(patient, policies, "groups of 8", waiting)
            alone = await measure_storing(engine, batches)
            claiming = asyncio.create_task(claim_and_release(engine))
            beside = await measure_storing(engine, batches)
            claiming.cancel()
            await asyncio.wait([claiming])
        finally:
            await engine.dispose()
            await patient.dispose()
            server.stop()
    return {
        "waiting": waiting,
        "policies": len(policies),
        "most_of_key": most_of_key,
        "shapes": shapes,
        "storing_ms": {"alone": _summary(alone), "while claiming": _summary(beside)},
    }


def _summary(durations: list[float]) -> dict[str, float]:
    return {"median": median(durations), "largest": durations[-1]}


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    each = f"each for {found['policies']} policies" if found["policies"] > 1 else "for one policy"
    if found["most_of_key"] < 1:
        each += f", {found['most_of_key']:g} of an update from one API key at most"
    table = Table(title=f"{found['waiting']:,} episodes wait, {each}; milliseconds")
    for name in ("backlog", "taken", "look", "claim", "look for the stale and the aged"):
        table.add_column(name, justify="left" if name == "backlog" else "right")
    for one in found["shapes"]:
        times = (one["look_ms"], one["claim_ms"], one["expire_ms"])
        table.add_row(one["shape"], str(one["taken"]), *[f"{value:.0f}" for value in times])
    console = Console()
    console.print(table)
    for name, one in found["storing_ms"].items():
        console.print(
            f"50 calls stored, {name}: median {one['median']:.1f} ms, largest {one['largest']:.1f}"
        )


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--policies", type=int, default=1, help="policies with calls in an episode")
    parser.add_argument(
        "--most-of-key", type=float, default=1.0, help="share of an update from one API key; 1: any"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.policies < 1:
        parser.error("--policies: at least one")
    if not 1 / GROUPS.groups <= options.most_of_key <= 1:
        parser.error(f"--most-of-key: from {1 / GROUPS.groups:g}, one group, to 1")
    policies = ["m", *[f"m{number}" for number in range(2, options.policies + 1)]]
    found = asyncio.run(measure(options.waiting, options.batches, policies, options.most_of_key))
    show(found)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
