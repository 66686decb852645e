"""States of versions: each change has one event, whatever happens in between, and who is late."""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.claims import begin_update
from store.errors import RolledBack, StateChanged, UnknownPolicy, WrongVersionState
from store.read.gates import read_gated_policy, served_since
from store.version_queries import list_events, list_servable, list_versions, why_held
from store.version_states import (
    ALLOWED_TRANSITIONS,
    add_version,
    begin_canary,
    change_state,
    ensure_base,
    freeze,
    hold_training,
    lock_policies,
    mark_unloaded,
    move_control,
    promote_together,
    recall,
    roll_back,
)
from store.version_states import set_state as set_one
from store.versions import POLICY_STATES, PolicyState
from tests.support.ledger.lineage import load, promote, set_state, trained
from tests.support.ledger.states import TEST, canary, check_told, states, told, version

BY: Final[Any] = {"reason": TEST, "actor": "operator"}
RULE: Final = {"mode": "immediate", "control_share": 0.05, "wait_for_others_s": 1e9}


async def loads(connection: AsyncConnection, number: int) -> None:
    await load(connection, "m", number, RULE, **BY)


async def tries(connection: AsyncConnection, number: int) -> None:
    await begin_canary(connection, await version(connection, number), 0.1, **BY)


async def falls(connection: AsyncConnection, number: int) -> None:
    await roll_back(connection, await version(connection, number), **BY)


async def falls_with_its_child(connection: AsyncConnection, _: int) -> None:
    """Version 2 gets the traffic, and falls with what served since the control."""
    await promote(connection, "m", 2)
    await falls(connection, 2)


async def rejects(connection: AsyncConnection, number: int) -> None:
    await set_one(connection, "m", number, "rejected", **BY)


async def retires(connection: AsyncConnection, number: int) -> None:
    await change_state(connection, await version(connection, number), "retired", **BY)


Move = Callable[[AsyncConnection, int], Awaitable[object]]
# What makes version 1 change in each way that is allowed; version 2 was trained from it.
MOVES: Final[dict[tuple[PolicyState, PolicyState], Move]] = {
    ("written", "loaded"): loads,
    ("written", "retired"): lambda connection, _: loads(connection, 2),
    ("written", "rejected"): rejects,
    ("loaded", "canary"): tries,
    ("loaded", "serving"): lambda connection, number: promote(connection, "m", number),
    ("loaded", "retired"): lambda connection, _: loads(connection, 2),
    ("loaded", "rejected"): falls,
    ("canary", "serving"): lambda connection, number: promote(connection, "m", number),
    ("canary", "retired"): retires,
    ("canary", "rolled_back"): falls,
    ("serving", "retired"): lambda connection, _: promote(connection, "m", 2),
    ("serving", "rolled_back"): falls,
    ("retired", "serving"): lambda connection, number: promote(connection, "m", number),
    ("retired", "rolled_back"): falls_with_its_child,
}


async def put(connection: AsyncConnection, state: PolicyState) -> None:
    """Let version 1 be in that state; what is retired or rolled back had the traffic."""
    await trained(connection, 0, 1)
    if state in ("serving", "retired", "rolled_back"):
        await promote(connection, "m", 1, rule=RULE)
    if state == "retired":
        await promote(connection, "m", 0)
        await promote(connection, "m", 2, rule=RULE)
        await promote(connection, "m", 1)
        await promote(connection, "m", 2)
    elif state == "rolled_back":
        await falls(connection, 1)
    elif state != "serving":
        await set_state(connection, "m", 1, state)


def test_each_allowed_change_of_a_versions_state_has_a_function() -> None:
    assert set(MOVES) == {
        (before, to) for before in ALLOWED_TRANSITIONS for to in ALLOWED_TRANSITIONS[before]
    }
    assert set(ALLOWED_TRANSITIONS) == set(POLICY_STATES)
    assert len(POLICY_STATES) == 7


@pytest.mark.parametrize(("before", "to"), MOVES)
async def test_each_change_of_a_versions_state_writes_a_single_event(
    engine: AsyncEngine, before: PolicyState, to: PolicyState
) -> None:
    async with engine.begin() as connection:
        await put(connection, before)
    was = (await told(engine))[1]
    assert was[-1][1] == before
    async with engine.begin() as connection:
        await MOVES[before, to](connection, 1)
    assert (await states(engine))[1] == to
    assert (await told(engine))[1] == [*was, (before, to)]
    await check_told(engine)


@pytest.mark.parametrize("before", POLICY_STATES)
async def test_forbidden_change_of_a_versions_state_is_refused(
    engine: AsyncEngine, before: PolicyState
) -> None:
    async with engine.begin() as connection:
        await put(connection, before)
    were = await states(engine), await told(engine)
    for to in set(POLICY_STATES) - ALLOWED_TRANSITIONS[before] - {before}:
        with pytest.raises((StateChanged, RolledBack), match=f"cannot become '{to}'"):
            async with engine.begin() as connection:
                await set_one(connection, "m", 1, to, **BY)
    assert (await states(engine), await told(engine)) == were


async def test_event_of_a_state_change_has_actor_reason_and_evidence(engine: AsyncEngine) -> None:
    proof = {"verdict": "better", "arms": {"canary": {"episodes": 50}}}
    async with engine.begin() as connection:
        await trained(connection, 0)
        await canary(connection, 1)
        await promote(connection, "m", 1, reason="better", actor="controller", evidence=proof)
        # What it is already, it need not become.
        await promote(connection, "m", 1)
    async with engine.connect() as connection:
        newest, before = await list_events(connection, "m", 1, most=2)
        assert (newest.reason, newest.actor, newest.evidence) == ("better", "controller", proof)
        assert before.to_state == "canary"
        # What rests on nothing has no evidence, and not JSON's null.
        given = "SELECT count(*) FROM policy_events WHERE jsonb_typeof(evidence) <> 'object'"
        assert await connection.scalar(text(given)) == 0


async def test_promotion_killed_before_its_commit_changes_nothing(engine: AsyncEngine) -> None:
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


async def test_event_that_cannot_be_written_leaves_the_state_unchanged_even_in_autocommit(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        written = await version(connection, 1)
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(DBAPIError):
            await change_state(connection, written, "loaded", reason="\0", actor="trainer")
    assert await states(engine) == {0: "serving", 1: "written"}
    await check_told(engine)


async def test_only_a_single_concurrent_roll_back_succeeds(engine: AsyncEngine) -> None:
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


async def test_events_match_states_after_concurrent_changes(engine: AsyncEngine) -> None:
    """Controllers and operators at once, in an order of chance: no change without its event."""
    async with engine.begin() as connection:
        await trained(connection, *range(6))
        await promote(connection, "m", 1, rule=RULE)

    async def act(draw: Random) -> None:
        number = draw.randint(1, 6)
        async with engine.begin() as connection:
            one = await version(connection, number)
            if draw.random() < 0.3:
                await promote(connection, "m", number)
            elif one.state == "written":
                await loads(connection, number)
            elif one.state == "loaded":
                await tries(connection, number)
            elif one.state == "retired":
                await mark_unloaded(connection, "m", [number], TEST, "trainer")
            else:
                await falls(connection, number)

    late = (StateChanged, WrongVersionState, RolledBack, IntegrityError)
    for turn in range(8):
        ended = await asyncio.gather(
            *(act(Random(f"{turn}.{one}")) for one in range(4)), return_exceptions=True
        )
        assert all(one is None or isinstance(one, late) for one in ended), ended
        now = list((await states(engine)).values())
        assert now.count("serving") == 1
        assert now.count("canary") <= 1
    await check_told(engine)


async def test_concurrent_promotions_of_a_policy_are_serialised(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 0, 0, 0)
        for number in range(1, 5):
            await promote(connection, "m", number, rule=RULE, actor="trainer")

    async def promoted(number: int) -> None:
        async with engine.begin() as connection:
            await promote(connection, "m", number, actor="trainer")

    await asyncio.gather(*(promoted(number) for number in (1, 2, 3, 4, 2, 1)))
    now = await states(engine)
    assert sorted(now.values()) == [*["retired"] * 4, "serving"]
    async with engine.connect() as connection:
        stands = await read_gated_policy(connection, "m")
        assert stands is not None
        assert stands.control is not None
        # The base model served first, and nothing was proven since.
        assert stands.control.version.version == 0
        assert await served_since(connection, "m", stands.control.since) == {1, 2, 3, 4}
    await check_told(engine)


async def test_served_since_counts_only_versions_that_got_the_traffic(engine: AsyncEngine) -> None:
    """What stays in its state, such as what is frozen, did not get it."""
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
        [begun] = await list_events(connection, "m", 0)
        await promote(connection, "m", 1)
        since = (await list_events(connection, "m", 1, most=1))[0].at
        await promote(connection, "m", 0)
        at = (await list_events(connection, "m", 0, most=1))[0].at
        await freeze(connection, "m", frozen=True, **BY)
        await promote(connection, "m", 2)
        assert await served_since(connection, "m", begun.at) == {0, 1, 2}
        assert await served_since(connection, "m", since) == {0, 1, 2}
        assert await served_since(connection, "m", at) == {0, 2}
        later = (await list_events(connection, "m", 2, most=1))[0].at
        assert await served_since(connection, "m", later) == {2}


# Which versions servers keep


async def test_model_servers_keep_only_versions_that_episodes_may_use(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 1, 0)
        await promote(connection, "m", 1, rule=RULE)
        await canary(connection, 2, share=0.25)
        await falls(connection, 2)
        await loads(connection, 3)
        # Nobody has it: it waited, and a newer one waits instead.
        await loads(connection, 4)
        servable = await list_servable(connection, "m")
        assert {one.version: (one.state, one.share) for one in servable} == {
            0: ("retired", 0.05),
            1: ("serving", None),
            2: ("rolled_back", None),
            4: ("loaded", None),
        }
        assert all(one.is_servable for one in servable)
        old = await version(connection, 3)
        assert (old.state, old.unloaded, old.is_servable) == ("retired", True, False)
    await check_told(engine)


async def test_unloaded_version_serves_once_it_is_recalled(engine: AsyncEngine) -> None:
    """Recalled: marked to be loaded again. Only then can it be promoted."""
    async with engine.begin() as connection:
        await trained(connection, 0, 0, 0)
        for number in (1, 2, 3):
            await promote(connection, "m", number, rule=RULE)
        # Neither what serves is unloaded, nor the control, nor what is unloaded already.
        for left in ({1, 2}, set[int]()):
            assert await mark_unloaded(connection, "m", range(4), "idle", "trainer") == left
        with pytest.raises(StateChanged, match="m@1 is unloaded, so it cannot serve: recall it"):
            await promote_now(connection, 1)
        await recall(connection, "m", 1, **BY)
        assert (await version(connection, 1)).is_servable
        await promote_now(connection, 1)
        with pytest.raises(StateChanged, match="m@1 cannot be loaded again"):
            await recall(connection, "m", 1, **BY)
    assert (await told(engine))[1][-4:] == [
        ("serving", "retired"),
        ("retired", "retired"),
        ("retired", "retired"),
        ("retired", "serving"),
    ]
    await check_told(engine)


async def promote_now(connection: AsyncConnection, number: int) -> None:
    from store.version_states import promote as promote_one

    await promote_one(connection, "m", number, **BY)


# The control, on a share of new episodes


async def control_of(connection: AsyncConnection) -> tuple[int, float | None] | None:
    stands = await read_gated_policy(connection, "m")
    if stands is None or stands.control is None:
        return None
    return stands.control.version.version, stands.control.version.share


async def test_control_stays_until_it_moves_on_or_a_version_was_tried(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, *range(7))
        assert await control_of(connection) is None
        await promote(connection, "m", 1, rule=RULE)
        assert await control_of(connection) == (0, 0.05)
        # Its share is the newer rule's.
        await promote(connection, "m", 2, rule={**RULE, "control_share": 0.2})
        assert await control_of(connection) == (0, 0.2)
        await move_control(connection, "m", 1, 0.1, **BY)
        assert await control_of(connection) == (1, 0.1)
        # What was tried against 2 is compared with it on; but not what a person promotes.
        tried: Any = {"rule": {**RULE, "mode": "canary"}, "control_share": 0.3}
        await promote(connection, "m", 3, **tried)
        assert await control_of(connection) == (1, 0.3)
        await promote(connection, "m", 4, actor="controller", **tried)
        assert await control_of(connection) == (3, 0.3)
        await promote(connection, "m", 5, rule={})
        assert await control_of(connection) is None
        # Where there is none, what served becomes it.
        await promote(connection, "m", 6, rule=RULE)
        assert await control_of(connection) == (5, 0.05)
        await promote(connection, "m", 5)
        assert await control_of(connection) is None
    await check_told(engine)


async def test_training_is_held_until_a_person_lets_another_version_serve(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 2)
        await promote(connection, "m", 1, rule=RULE)
        assert await why_held(connection, "m") is None
        await hold_training(connection, await version(connection, 1), 0.5, **BY)
        assert await why_held(connection, "m") == BY["reason"]
        assert await control_of(connection) == (0, 0.5)
        # An update that was under way ends, and the next one is not begun.
        await promote(connection, "m", 2, rule=RULE, actor="controller")
        assert await why_held(connection, "m") == BY["reason"]
        assert await control_of(connection) == (0, 0.5)
        await promote(connection, "m", 3, rule=RULE, actor="operator")
        assert await why_held(connection, "m") is None
        assert await control_of(connection) == (0, 0.05)
        await promote(connection, "m", 1)
        assert await why_held(connection, "m") is None
    await check_told(engine)


async def test_share_of_new_episodes_is_the_canarys_alone_and_ends_with_it(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
        await canary(connection, 1)
        await promote(connection, "m", 1)
        assert (await version(connection, 1)).share is None
        assert (await version(connection, 0)).share == 0.05
        stale = msgspec.structs.replace(await version(connection, 1), state="canary")
        with pytest.raises(StateChanged, match="m@1 is not 'canary' any more"):
            await change_state(connection, stale, "rolled_back", **BY)
        await canary(connection, 2)
        await retires(connection, 2)
        assert (await version(connection, 2)).share is None
    for number, share in ((0, 1.5), (1, 0.5)):
        async with engine.connect() as connection:
            query = text("UPDATE policies SET share = :share WHERE version = :version")
            with pytest.raises(IntegrityError, match="ck_policies_share_is"):
                await connection.execute(query, {"share": share, "version": number})


async def test_frozen_policy_promotes_no_version(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        await loads(connection, 1)
        await freeze(connection, "m", frozen=True, reason="holidays", actor="operator")
        assert await promote_together(connection, ["m"]) == []
        [event] = await list_events(connection, "m", 0, most=1)
        assert (event.reason, event.actor) == ("frozen: holidays", "operator")
        await freeze(connection, "m", frozen=False, reason="back", actor="operator")
        assert len(await promote_together(connection, ["m"])) == 1
        with pytest.raises(UnknownPolicy):
            await freeze(connection, "other", frozen=True, reason=TEST, actor="operator")


async def test_lock_of_an_idle_controller_on_a_policy_ends(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a controller does not that is stopped, or whose machine is cut off."""
    async with engine.begin() as connection:
        await trained(connection)
    async with engine.connect() as stopped:
        monkeypatch.setattr("store.version_states.IDLE_TRANSACTION_S", 2.0)
        await lock_policies(stopped, ["m"])
        async with asyncio.timeout(120.0), engine.begin() as connection:
            await lock_policies(connection, ["m"])
        await stopped.invalidate()


# Versions that go live together


BOTH = ("checker", "writer")


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


async def test_readers_see_partner_versions_promoted_together(written: AsyncEngine) -> None:
    async with written.begin() as connection:
        await load(connection, "writer", 1, RULE, **BY)
        assert await promote_together(connection, BOTH) == []
    async with written.connect() as looking:
        async with written.begin() as connection:
            await load(connection, "checker", 1, RULE, **BY)
            promoted = await promote_together(connection, BOTH)
            assert [v.served_name for v in promoted] == ["checker@1", "writer@1"]
            assert await serving(looking) == {"checker": 0, "writer": 0}
        assert await serving(looking) == {"checker": 1, "writer": 1}


async def test_concurrent_trainers_leave_a_joint_promotion_to_a_later_transaction(
    written: AsyncEngine,
) -> None:
    async with written.connect() as one, written.connect() as other:
        for connection, name in ((one, "writer"), (other, "checker")):
            await load(connection, name, 1, RULE, **BY)
            assert await promote_together(connection, BOTH) == []
        await one.commit()
        await other.commit()
    async with written.begin() as connection:
        assert len(await promote_together(connection, BOTH)) == 2
        assert await serving(connection) == {"checker": 1, "writer": 1}


@pytest.mark.parametrize(
    ("rule", "before"),
    [
        (RULE, "retired"),
        ({"mode": "canary", "approve": True}, "retired"),
        # Somebody, or an evaluation, is busy with it.
        ({"mode": "evaluated"}, "loaded"),
        ({"mode": "immediate", "approve": True}, "loaded"),
    ],
)
async def test_newer_version_replaces_a_waiting_version_unless_under_review(
    written: AsyncEngine, rule: dict[str, Any], before: str
) -> None:
    async with written.begin() as connection:
        await load(connection, "writer", 1, rule, **BY)
        await connection.exec_driver_sql("UPDATE updates SET state = 'done'")
        update = await begin_update(connection, "writer", 0, {})
        await add_version(connection, "writer", 2, "/writer/2", update)
        await load(connection, "writer", 2, RULE, **BY)
        found = {v.version: v.state for v in await list_versions(connection, "writer")}
    assert found == {0: "serving", 1: before, 2: "loaded"}


@pytest.mark.parametrize("rule", [{"mode": "canary"}, {"mode": "immediate", "approve": True}])
async def test_version_that_is_to_be_judged_does_not_go_live_by_itself(
    written: AsyncEngine, rule: dict[str, Any]
) -> None:
    async with written.begin() as connection:
        await load(connection, "writer", 1, rule, **BY)
        assert await promote_together(connection, ["writer"]) == []
        # It has waited for its partner for long enough.
        await load(connection, "checker", 1, RULE | {"wait_for_others_s": -1.0}, **BY)
        [promoted] = await promote_together(connection, BOTH)
        assert promoted.served_name == "checker@1"
