"""States of versions: each change has one event, whatever happens in between, and who is late."""

import asyncio
from random import Random

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.adapter_slots import retire_longest
from store.claims import begin_update
from store.errors import NotGated, RolledBack, StateChanged, UnknownPolicy
from store.version_queries import list_events, list_live, list_servable, list_versions
from store.version_states import (
    add_version,
    begin_canary,
    change_state,
    ensure_base,
    freeze,
    hold_gate,
    make_candidate,
    make_ready,
    promote_together,
    roll_back,
)
from tests.support.ledger.lineage import promote, set_state, trained
from tests.support.ledger.states import TEST, canary, check_told, states, told, version
from tests.support.waiting import eventually


async def test_each_change_of_state_has_one_event(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 2)
        await ensure_base(connection, "m")
        await make_ready(connection, "m", 1, reason="probed", actor="trainer")
        assert len(await promote_together(connection, ["m"], 1e9)) == 1
        tried = await canary(connection, 2)
        proof = {"lower": 0.1, "arms": {"canary": {"episodes": 50}}}
        why = {"reason": "better", "actor": "controller", "evidence": proof}
        await promote(connection, "m", tried.version, **why)
        # What it is already, it need not become.
        await promote(connection, "m", 2, reason=TEST, actor="operator")
        await set_state(connection, "m", 3, "rejected", reason="no", actor="trainer")
    assert await told(engine) == {
        0: [(None, "serving"), ("serving", "published")],
        1: [
            (None, "written"),
            ("written", "ready"),
            ("ready", "serving"),
            ("serving", "published"),
        ],
        2: [
            (None, "written"),
            ("written", "candidate"),
            ("candidate", "canary"),
            ("canary", "serving"),
        ],
        3: [(None, "written"), ("written", "rejected")],
    }
    async with engine.connect() as connection:
        newest = (await list_events(connection, "m", 2, most=1))[0]
        assert (newest.reason, newest.actor, newest.evidence) == ("better", "controller", proof)
        [before] = await list_events(connection, "m", 2, most=1, before=newest.id)
        assert before.to_state == "canary"
        # What rests on nothing has no evidence, and not JSON's null.
        given = "SELECT count(*) FROM policy_events WHERE jsonb_typeof(evidence) <> 'object'"
        assert await connection.scalar(text(given)) == 0


async def test_what_is_killed_before_it_is_committed_changed_nothing(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
        await promote(connection, "m", 1, reason=TEST, actor="trainer")
        tried = await canary(connection, 2)
    before = await states(engine), await told(engine)

    async def killed() -> None:
        async with engine.begin() as connection:
            await promote(connection, "m", tried.version, reason=TEST, actor="controller")
            own = await connection.scalar(text("SELECT pg_backend_pid()"))
            async with engine.connect() as other:
                await other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": own})
            await promote(connection, "m", 0, reason=TEST, actor="controller")

    with pytest.raises(DBAPIError):
        await killed()
    assert (await states(engine), await told(engine)) == before


async def test_a_change_is_not_there_without_its_event_even_where_each_statement_is_committed(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        written = await version(connection, 1)
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(DBAPIError):
            await change_state(connection, written, "ready", reason="\0", actor="trainer")
    assert await states(engine) == {0: "serving", 1: "written"}
    await check_told(engine)


async def test_of_two_controllers_who_decide_at_once_one_does(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
        await promote(connection, "m", 1, reason=TEST, actor="trainer")
        tried = await canary(connection, 2)

    async def give_up() -> str:
        async with engine.begin() as connection:
            await roll_back(connection, tried, reason="worse", actor="controller")
        return "rolled_back"

    ended = await asyncio.gather(*(give_up() for _ in range(4)), return_exceptions=True)
    assert ended.count("rolled_back") == 1
    assert sum(isinstance(one, StateChanged) for one in ended) == 3
    assert (await told(engine))[2][-1] == ("canary", "rolled_back")
    await check_told(engine)


async def test_whoever_decides_at_once_the_events_tell_what_there_is(engine: AsyncEngine) -> None:
    """Controllers and operators at once, in an order of chance: no change without its event."""
    async with engine.begin() as connection:
        await trained(connection, *range(6))
        await promote(connection, "m", 1, reason=TEST, actor="trainer")

    async def act(draw: Random) -> None:
        number = draw.randint(1, 6)
        async with engine.begin() as connection:
            one = await version(connection, number)
            if draw.random() < 0.3:
                await promote(connection, "m", number, reason=TEST, actor="operator")
            elif one.state == "written":
                await make_candidate(connection, "m", number, {}, reason=TEST)
            elif one.state == "candidate":
                await begin_canary(connection, one, 0.1, 0.0, reason=TEST, actor="controller")
            else:
                await roll_back(connection, one, reason=TEST, actor="controller")

    late = (StateChanged, NotGated, RolledBack, IntegrityError)
    for turn in range(8):
        ended = await asyncio.gather(
            *(act(Random(f"{turn}.{one}")) for one in range(4)), return_exceptions=True
        )
        assert all(one is None or isinstance(one, late) for one in ended), ended
        now = list((await states(engine)).values())
        assert now.count("serving") == 1
        assert now.count("canary") <= 1
    await check_told(engine)


async def test_all_that_an_episode_may_have_is_loaded(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 1)
        await promote(connection, "m", 1, reason=TEST, actor="trainer")
        tried = await canary(connection, 2, share=0.25)
        assert (tried.share, (await version(connection, 0)).share) == (0.25, 0.02)
        await roll_back(connection, tried, reason=TEST, actor="controller")
        await make_candidate(connection, "m", 3, {}, reason=TEST)
        servable = {one.version: one.state for one in await list_servable(connection, "m")}
        assert servable == {0: "published", 1: "serving", 2: "rolled_back", 3: "candidate"}
        live = await list_live(connection, "m")
        assert [(one.version, one.share, one.rolled_back) for one in live] == [
            (0, 0.02, False),
            (1, None, False),
            (2, 0.25, True),
            (3, None, False),
        ]
        # Its slot is given up like that of any other that lost the traffic.
        long_ago = "UPDATE policies SET changed_at = now() - interval '1 day' WHERE version = 2"
        await connection.execute(text(long_ago))
        assert await retire_longest(connection, "m", 60.0) == "m@2"
    await check_told(engine)


async def test_a_share_is_the_canarys_alone_and_ends_with_it(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
        await canary(connection, 1)
        await promote(connection, "m", 1, reason=TEST, actor="controller")
        assert (await version(connection, 1)).share is None
        assert (await version(connection, 0)).share == 0.02
        stale = msgspec.structs.replace(await version(connection, 1), state="canary")
        with pytest.raises(StateChanged, match="m@1 is not 'canary' any more"):
            await change_state(connection, stale, "rolled_back", reason=TEST, actor="controller")
    with pytest.raises(IntegrityError, match="share_is_a_share"):
        async with engine.begin() as connection:
            await begin_canary(
                connection, await version(connection, 2), 1.5, 0.0, reason=TEST, actor="controller"
            )


async def test_nothing_goes_live_of_a_policy_that_is_frozen(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        await make_ready(connection, "m", 1, reason=TEST, actor="trainer")
        await freeze(connection, "m", frozen=True, reason="holidays", actor="operator")
        assert await promote_together(connection, ["m"], 0.0) == []
        [event] = await list_events(connection, "m", 0, most=1)
        assert (event.reason, event.actor) == ("frozen: holidays", "operator")
        await freeze(connection, "m", frozen=False, reason="back", actor="operator")
        assert len(await promote_together(connection, ["m"], 0.0)) == 1
        with pytest.raises(UnknownPolicy):
            await freeze(connection, "other", frozen=True, reason=TEST, actor="operator")


async def test_a_gate_is_not_held_for_ever_by_one_that_does_nothing_any_more(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a controller does not that is stopped, or whose machine is cut off."""

    async def is_free() -> bool:
        async with engine.begin() as connection:
            return await hold_gate(connection, "m")

    async with engine.connect() as stopped:
        monkeypatch.setattr("store.version_states.IDLE_S", 2.0)
        assert await hold_gate(stopped, "m")
        assert not await is_free()
        await eventually(is_free, within_s=120.0)
        await stopped.invalidate()


# Versions that go live together


BOTH = ("checker", "writer")
FOR_EVER = 1e9


@pytest.fixture
async def written(engine: AsyncEngine) -> AsyncEngine:
    """Two policies, each with a version that is written."""
    async with engine.begin() as connection:
        for name in BOTH:
            await ensure_base(connection, name, "m")
            update = await begin_update(connection, name, 0, {})
            await add_version(connection, name, 1, f"/{name}/1", update)
    return engine


async def serving(connection: AsyncConnection) -> dict[str, int]:
    return {v.name: v.version for v in await list_versions(connection) if v.state == "serving"}


async def test_who_looks_sees_both_old_or_both_new(written: AsyncEngine) -> None:
    async with written.begin() as connection:
        await make_ready(connection, "writer", 1, reason=TEST, actor="operator")
        assert await promote_together(connection, BOTH, FOR_EVER) == []
    async with written.connect() as looking:
        async with written.begin() as connection:
            await make_ready(connection, "checker", 1, reason=TEST, actor="operator")
            promoted = await promote_together(connection, BOTH, FOR_EVER)
            assert [v.served_name for v in promoted] == ["checker@1", "writer@1"]
            assert await serving(looking) == {"checker": 0, "writer": 0}
        assert await serving(looking) == {"checker": 1, "writer": 1}


async def test_two_trainers_that_are_at_it_at_once_leave_it_to_the_next_look(
    written: AsyncEngine,
) -> None:
    async with written.connect() as one, written.connect() as other:
        for connection, name in ((one, "writer"), (other, "checker")):
            await make_ready(connection, name, 1, reason=TEST, actor="operator")
            assert await promote_together(connection, BOTH, FOR_EVER) == []
        await one.commit()
        await other.commit()
    async with written.begin() as connection:
        assert len(await promote_together(connection, BOTH, FOR_EVER)) == 2
        assert await serving(connection) == {"checker": 1, "writer": 1}


async def test_a_newer_version_takes_the_place_of_one_that_waits(written: AsyncEngine) -> None:
    async with written.begin() as connection:
        await make_ready(connection, "writer", 1, reason=TEST, actor="operator")
        await connection.exec_driver_sql("UPDATE updates SET state = 'done'")
        update = await begin_update(connection, "writer", 0, {})
        await add_version(connection, "writer", 2, "/writer/2", update)
        await make_ready(connection, "writer", 2, reason=TEST, actor="operator")
        found = {v.version: v.state for v in await list_versions(connection, "writer")}
    assert found == {0: "serving", 1: "retired", 2: "ready"}
