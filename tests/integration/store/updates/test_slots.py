"""Which versions need an adapter slot of a model server that several policies share."""

import asyncio

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.adapter_slots import (
    _LIVE,
    LONGEST_KEPT_S,
    RESERVED_S,
    LiveCounts,
    count_live_versions,
    lock_slots,
    unload_kept_versions,
    versions_kept_for_episodes,
)
from store.claims import begin_update, release
from store.version_states import ensure_base
from tests.support.ledger.episodes import ingest
from tests.support.ledger.lineage import State, add_in_state
from tests.support.records import call
from tests.support.waiting import eventually


async def add(
    engine: AsyncEngine, name: str, *states: tuple[State, float], base: str = "b"
) -> None:
    """Add versions 1, 2, … of a policy: each its state, and the seconds since it has it."""
    async with engine.begin() as connection:
        await ensure_base(connection, name, base)
        for version, (state, ago_s) in enumerate(states, 1):
            if state == "serving":
                serving = "UPDATE policies SET state = 'retired' WHERE name = :name AND version = 0"
                await connection.execute(text(serving), {"name": name})
            await add_in_state(connection, name, version, state, ago_s=ago_s)


async def live(engine: AsyncEngine, name: str = "m") -> LiveCounts:
    async with engine.connect() as connection:
        return await count_live_versions(connection, name)


def counts(found: LiveCounts) -> tuple[int, int, int]:
    """How many serve, are kept and are coming."""
    return found.serving + found.ready, found.held + found.kept, found.coming


async def test_versions_of_all_policies_on_a_model_server_count_for_its_slots(
    engine: AsyncEngine,
) -> None:
    await add(engine, "m", ("retired", 9e3), ("rejected", 0.0), ("serving", 5.0), ("written", 5.0))
    await add(engine, "n", ("loaded", 5.0), ("unloaded", 5.0), ("unloaded", 50.0), ("written", 9e3))
    await add(engine, "elsewhere", ("retired", 5.0), ("serving", 5.0), base="another")
    assert counts(await live(engine)) == counts(await live(engine, "n")) == (2, 1, 1)
    assert counts(await live(engine, "elsewhere")) == (1, 1, 0)


async def test_removed_policy_needs_no_slot_once_its_episodes_are_over(
    engine: AsyncEngine,
) -> None:
    await add(engine, "m", ("retired", 9e3), ("serving", 9e3))
    await add(engine, "renamed", ("retired", 9.0), ("serving", 9e3), ("loaded", 9e3))

    async def needed(*known: str) -> tuple[int, int, int]:
        async with engine.connect() as connection:
            found = await count_live_versions(connection, "m", known=known)
        return found.serving, found.ready, found.kept + found.held

    # One whose trainer is only away is configured, and loses nothing.
    assert await needed("m", "renamed") == (2, 1, 2)
    assert await needed("m") == (1, 0, 2)
    async with engine.begin() as connection:
        await ingest(connection, [call("e", policy="renamed", policy_version=2)])
    assert await needed("m") == (2, 1, 2)
    async with engine.begin() as connection:
        await connection.execute(
            text(f"UPDATE episodes SET last_call_at = now() - {2 * RESERVED_S} * interval '1 s'")
        )
    assert await needed("m") == (1, 0, 2)


async def test_slot_query_reads_no_more_with_many_old_versions(engine: AsyncEngine) -> None:
    await add(engine, "elsewhere", *[("unloaded", 9e3)] * 30, base="another")
    await add(engine, "m", ("serving", 5.0))
    many = """
        WITH made AS (
            INSERT INTO updates (id, policy, parent_version, version, state, recipe, claimed_at)
            SELECT uuidv7(), 'm', 0, v, 'done', '{}', now() - interval '1 day'
            FROM generate_series(2, 10000) v RETURNING id, version)
        INSERT INTO policies
            (name, version, state, unloaded_at, served_name, adapter_path, update_id)
        SELECT 'm', version, 'retired', now(), 'm@' || version, '/a', id FROM made
    """
    async with engine.begin() as connection:
        await connection.execute(text(many))
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.execute(text("VACUUM ANALYZE policies, updates"))
        explained = text(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {_LIVE}")
        values = {"policy": "m", "together": [], "known": ["m"]}
        plan = await connection.scalar(explained, values)
    read = plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]
    # The table alone has more than a hundred.
    assert read < 80
    assert (await live(engine)).serving == 1


async def test_a_base_model_needs_no_slot(engine: AsyncEngine) -> None:
    await add(engine, "m")
    assert (await live(engine)).total == 0


async def test_running_update_reserves_a_slot_until_it_ends(engine: AsyncEngine) -> None:
    await add(engine, "m")
    await add(engine, "n")
    async with engine.begin() as connection:
        update = await begin_update(connection, "n", 0, {})
    assert (await live(engine)).coming == 1
    async with engine.begin() as connection:
        await release(connection, update, "test")
    assert (await live(engine)).coming == 0


async def test_update_left_running_by_a_lost_trainer_reserves_no_slot_for_ever(
    engine: AsyncEngine,
) -> None:
    await add(engine, "m")
    async with engine.begin() as connection:
        await begin_update(connection, "m", 0, {})
        await connection.execute(text("UPDATE updates SET claimed_at = now() - interval '1 day'"))
    assert (await live(engine)).coming == 0


async def test_version_that_lost_the_traffic_first_gives_up_its_slot_first(
    engine: AsyncEngine,
) -> None:
    """But not the control, to which a roll-back would give the traffic."""
    await add(engine, "m", ("retired", 400.0), ("retired", 390.0), ("serving", 9e3))
    await add(engine, "n", ("rolled_back", 500.0), ("retired", 100.0))
    async with engine.begin() as connection:
        control = "UPDATE policies SET share = 0.05 WHERE served_name = 'm@2'"
        await connection.execute(text(control))
        kept = await versions_kept_for_episodes(connection, "m")
        assert [one.served_name for one in kept] == ["n@1", "m@1", "n@2"]
        assert all(one.may_be_unloaded for one in kept)
        await unload_kept_versions(connection, kept, "slot", "trainer")
    found = await live(engine)
    assert (found.serving, found.held, found.kept) == (1, 1, 0)


async def test_version_with_episodes_under_way_gives_up_its_slot_last_and_after_a_time_limit(
    engine: AsyncEngine,
) -> None:
    long, short = LONGEST_KEPT_S + 9.0, LONGEST_KEPT_S - 9.0
    await add(
        engine, "m", ("retired", long), ("retired", short), ("retired", 60.0), ("serving", 60.0)
    )
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE policies SET share = 0.05 WHERE version = 0"))
        await ingest(connection, [call(f"e{v}", policy_version=v) for v in (1, 2)])
        kept = await versions_kept_for_episodes(connection, "m")
    assert [(one.version, one.may_be_unloaded) for one in kept] == [
        (3, True),
        (1, True),
        (2, False),
    ]
    assert 0.0 < kept[-1].at_most_s <= 9.0


async def is_waited_for(engine: AsyncEngine) -> bool:
    """Whether somebody waits for an advisory lock of this database."""
    query = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    async with engine.connect() as connection:
        return bool(await connection.scalar(text(query)))


async def test_two_trainers_do_not_take_the_last_slot_at_once(engine: AsyncEngine) -> None:
    await add(engine, "m")
    await add(engine, "n")
    async with engine.connect() as one, engine.connect() as other:
        await lock_slots(one, "m")
        waiting = asyncio.create_task(lock_slots(other, "n"))
        await eventually(lambda: is_waited_for(engine))
        assert not waiting.done()
        await one.commit()
        await asyncio.wait_for(waiting, 10.0)


async def test_trainers_of_different_model_servers_do_not_wait_for_each_others_slots(
    engine: AsyncEngine,
) -> None:
    await add(engine, "m")
    await add(engine, "elsewhere", base="another")
    async with engine.connect() as one, engine.connect() as other:
        await lock_slots(one, "m")
        await asyncio.wait_for(lock_slots(other, "elsewhere"), 10.0)


async def test_only_policies_that_go_live_together_count_as_ready_partners(
    engine: AsyncEngine,
) -> None:
    await add(engine, "m", ("serving", 9.0), ("loaded", 5.0))
    await add(engine, "n", ("serving", 9.0))
    await add(engine, "o", ("serving", 9.0), ("loaded", 5.0))
    async with engine.connect() as connection:

        async def partners(name: str) -> int:
            together = ("m", "n")
            return (await count_live_versions(connection, name, together)).partners_ready

        assert [await partners(name) for name in "mn"] == [0, 1]
    found = await live(engine)
    assert (found.serving, found.ready, found.partners_ready) == (3, 2, 0)
