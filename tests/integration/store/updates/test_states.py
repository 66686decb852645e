"""States of versions: each change has one event, whatever happens in between, and who is late."""

import asyncio
from itertools import pairwise
from random import Random

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.errors import NotGated, RolledBack, StateChanged, UnknownPolicy
from store.read.events import list_events
from store.read.standing import newest_promoted
from store.updates.gating import (
    begin_canary,
    freeze,
    hold_gate,
    is_frozen,
    make_candidate,
    roll_back,
    version_before,
)
from store.updates.policies import (
    ensure_base,
    list_live,
    list_servable,
    list_versions,
    make_ready,
    numbered_version,
    promote,
    promote_together,
)
from store.updates.slots import retire_longest
from store.updates.states import change_state, set_state
from store.versions import PolicyState, PolicyVersion
from tests.support.ledger.lineage import trained
from tests.support.waiting import eventually

TEST = "for the test"


async def states(engine: AsyncEngine) -> dict[int, PolicyState]:
    async with engine.connect() as connection:
        return {one.version: one.state for one in await list_versions(connection, "m")}


async def told(engine: AsyncEngine) -> dict[int, list[tuple[str | None, str]]]:
    """The changes of state that events tell of, oldest first, by version."""
    async with engine.connect() as connection:
        events = await list_events(connection, "m")
    found: dict[int, list[tuple[str | None, str]]] = {}
    for one in reversed(events):
        assert one.reason
        found.setdefault(one.version, []).append((one.from_state, one.to_state))
    return found


async def check_told(engine: AsyncEngine) -> None:
    """Each event begins where the one before it ended, and the last one ends where it is now."""
    now = await states(engine)
    for version, changes in (await told(engine)).items():
        assert changes[0][0] is None
        for (_, before), (after, _) in pairwise(changes):
            assert before == after
        assert changes[-1][1] == now[version]


async def version(connection: AsyncConnection, number: int) -> PolicyVersion:
    found = await numbered_version(connection, "m", number)
    assert found is not None
    return found


async def canary(connection: AsyncConnection, number: int, share: float = 0.1) -> PolicyVersion:
    await make_candidate(connection, "m", number, {"canary_share": share}, reason=TEST)
    candidate = await version(connection, number)
    await begin_canary(connection, candidate, share, 0.02, reason=TEST, actor="steward")
    return await version(connection, number)


async def test_each_change_of_state_has_one_event(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 2)
        await ensure_base(connection, "m")
        await make_ready(connection, "m", 1, reason="probed", actor="trainer")
        assert len(await promote_together(connection, ["m"], 1e9)) == 1
        tried = await canary(connection, 2)
        proof = {"lower": 0.1, "arms": {"canary": {"episodes": 50}}}
        why = {"reason": "better", "actor": "steward", "evidence": proof}
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
        assert (newest.reason, newest.actor, newest.evidence) == ("better", "steward", proof)
        [before] = await list_events(connection, "m", 2, most=1, before=newest.id)
        assert before.to_state == "canary"


async def test_what_is_killed_before_it_is_committed_changed_nothing(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
        await promote(connection, "m", 1, reason=TEST, actor="trainer")
        tried = await canary(connection, 2)
    before = await states(engine), await told(engine)

    async def killed() -> None:
        async with engine.begin() as connection:
            await promote(connection, "m", tried.version, reason=TEST, actor="steward")
            own = await connection.scalar(text("SELECT pg_backend_pid()"))
            async with engine.connect() as other:
                await other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": own})
            await promote(connection, "m", 0, reason=TEST, actor="steward")

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


async def test_of_two_stewards_who_decide_at_once_one_does(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
        await promote(connection, "m", 1, reason=TEST, actor="trainer")
        tried = await canary(connection, 2)

    async def give_up() -> str:
        async with engine.begin() as connection:
            await roll_back(connection, tried, reason="worse", actor="steward")
        return "rolled_back"

    ended = await asyncio.gather(*(give_up() for _ in range(4)), return_exceptions=True)
    assert ended.count("rolled_back") == 1
    assert sum(isinstance(one, StateChanged) for one in ended) == 3
    assert (await told(engine))[2][-1] == ("canary", "rolled_back")
    await check_told(engine)


async def test_whoever_decides_at_once_the_events_tell_what_there_is(engine: AsyncEngine) -> None:
    """Stewards and operators at once, in an order of chance: no change without its event."""
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
                await begin_canary(connection, one, 0.1, 0.0, reason=TEST, actor="steward")
            else:
                await roll_back(connection, one, reason=TEST, actor="steward")

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


async def test_what_was_rolled_back_does_not_serve_again(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        await promote(connection, "m", 1, reason=TEST, actor="trainer")
        before = await roll_back(
            connection, await version(connection, 1), reason="fell behind", actor="steward"
        )
        assert before is not None
        assert before.version == 0
    assert await states(engine) == {0: "serving", 1: "rolled_back"}
    async with engine.begin() as connection:
        with pytest.raises(RolledBack, match="m@1 was rolled back, so it cannot become 'serving'"):
            await promote(connection, "m", 1, reason=TEST, actor="operator")
        await set_state(connection, "m", 1, "retired", reason="idle", actor="trainer")
        assert (await version(connection, 1)).rolled_back
        with pytest.raises(RolledBack):
            await set_state(connection, "m", 1, "ready", reason=TEST, actor="trainer")
    with pytest.raises(IntegrityError, match="rolled_back_for_good"):
        async with engine.begin() as connection:
            await connection.execute(
                text("UPDATE policies SET state = 'published' WHERE version = 1")
            )


@pytest.mark.parametrize(("served", "before"), [((1, 2, 3, 1, 4), 1), ((1, 2, 3, 0, 4), 0)])
async def test_what_had_the_traffic_before_serves_again_whatever_its_number(
    engine: AsyncEngine, served: tuple[int, ...], before: int
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 2, before)
    for number in served:
        async with engine.begin() as connection:
            await promote(connection, "m", number, reason=TEST, actor="operator")
    async with engine.begin() as connection:
        await roll_back(connection, await version(connection, 4), reason=TEST, actor="steward")
    found = await states(engine)
    assert [number for number, state in found.items() if state == "serving"] == [before]


async def test_what_was_trained_on_from_what_is_rolled_back_goes_with_it(
    engine: AsyncEngine,
) -> None:
    # 2 and 5 were trained from 1, then 3 from 2, 4 from 3; and 6 from the base.
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 2, 3, 1, 0)
        await promote(connection, "m", 1, reason=TEST, actor="trainer")
        await canary(connection, 2)
        await make_ready(connection, "m", 5, reason=TEST, actor="trainer")
        await roll_back(connection, await version(connection, 1), reason="bad", actor="steward")
    found = await states(engine)
    assert (found[1], found[2], found[4], found[5]) == (
        "rolled_back",
        "rolled_back",
        "rejected",
        "rejected",
    )
    assert (found[0], found[6]) == ("serving", "written")
    async with engine.connect() as connection:
        [why] = [one.reason for one in await list_events(connection, "m", 4, most=1)]
    assert why == "it was trained on from m@1, which was rolled back"
    await check_told(engine)


async def test_all_that_an_episode_may_have_is_loaded(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 2)
        await promote(connection, "m", 1, reason=TEST, actor="trainer")
        tried = await canary(connection, 2, share=0.25)
        assert (tried.share, (await version(connection, 0)).share) == (0.25, 0.02)
        await roll_back(connection, tried, reason=TEST, actor="steward")
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
        await promote(connection, "m", 1, reason=TEST, actor="steward")
        assert (await version(connection, 1)).share is None
        assert (await version(connection, 0)).share == 0.02
        stale = msgspec.structs.replace(await version(connection, 1), state="canary")
        with pytest.raises(StateChanged, match="m@1 is not 'canary' any more"):
            await change_state(connection, stale, "rolled_back", reason=TEST, actor="steward")
    with pytest.raises(IntegrityError, match="share_is_a_share"):
        async with engine.begin() as connection:
            await begin_canary(
                connection, await version(connection, 2), 1.5, 0.0, reason=TEST, actor="steward"
            )


async def test_nothing_goes_live_of_a_policy_that_is_frozen(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        await make_ready(connection, "m", 1, reason=TEST, actor="trainer")
        await freeze(connection, "m", frozen=True, reason="holidays", actor="operator")
        assert await is_frozen(connection, "m")
        assert await promote_together(connection, ["m"], 0.0) == []
        [event] = await list_events(connection, "m", 0, most=1)
        assert (event.reason, event.actor) == ("frozen: holidays", "operator")
        await freeze(connection, "m", frozen=False, reason="back", actor="operator")
        assert not await is_frozen(connection, "m")
        assert len(await promote_together(connection, ["m"], 0.0)) == 1
        with pytest.raises(UnknownPolicy):
            await freeze(connection, "other", frozen=True, reason=TEST, actor="operator")


@pytest.mark.parametrize("then", ["published", "retired"])
async def test_a_canary_that_never_served_serves_after_no_roll_back(
    engine: AsyncEngine, then: PolicyState
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 0, 0)
        await promote(connection, "m", 1, reason=TEST, actor="operator")
        tried = await canary(connection, 2)
        # A newer one was promoted by hand meanwhile: the canary makes way for it.
        await change_state(connection, tried, "published", reason=TEST, actor="steward")
        assert await newest_promoted(connection, "m") == 1
        await promote(connection, "m", 3, reason=TEST, actor="operator")
        await set_state(connection, "m", 2, then, reason=TEST, actor="trainer")
        before = await version_before(connection, await version(connection, 3))
        assert before.version == 1
        serves = await roll_back(
            connection, await version(connection, 3), reason=TEST, actor="steward"
        )
        assert serves is not None
        assert serves.version == 1


async def test_what_was_trained_on_from_what_was_rolled_back_serves_after_no_roll_back(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 0)
        # An operator went back from 2 to 1, which fell then.
        for number in (1, 2, 1):
            await promote(connection, "m", number, reason=TEST, actor="operator")
        await roll_back(connection, await version(connection, 1), reason=TEST, actor="steward")
        assert (await version(connection, 2)).state == "published"
        await promote(connection, "m", 3, reason=TEST, actor="operator")
        assert (await version_before(connection, await version(connection, 3))).version == 0


async def test_what_had_the_traffic_last_is_told_by_who_moved_it_last(engine: AsyncEngine) -> None:
    """An operator's transaction began before the trainer's, and waited for it."""
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 1)
        await promote(connection, "m", 1, reason=TEST, actor="trainer")
    async with engine.begin() as operator:
        await operator.execute(text("SELECT now()"))
        async with engine.begin() as trainer:
            await promote(trainer, "m", 2, reason=TEST, actor="trainer")
        await promote(operator, "m", 1, reason=TEST, actor="operator")
    async with engine.begin() as connection:
        await promote(connection, "m", 3, reason=TEST, actor="trainer")
        assert (await version_before(connection, await version(connection, 3))).version == 1


async def test_what_served_before_events_were_kept_serves_after_a_roll_back(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
        await promote(connection, "m", 1, reason=TEST, actor="operator")
        await promote(connection, "m", 2, reason=TEST, actor="operator")
        await connection.execute(text("DELETE FROM policy_events WHERE version = 1"))
        assert (await version_before(connection, await version(connection, 2))).version == 1
        assert await newest_promoted(connection, "m") == 2


async def test_a_gate_is_not_held_for_ever_by_one_that_does_nothing_any_more(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a steward does not that is stopped, or whose machine is cut off."""

    async def is_free() -> bool:
        async with engine.begin() as connection:
            return await hold_gate(connection, "m")

    async with engine.connect() as stopped:
        monkeypatch.setattr("store.updates.gating.IDLE_S", 2.0)
        assert await hold_gate(stopped, "m")
        assert not await is_free()
        await eventually(is_free, within_s=120.0)
        await stopped.invalidate()


async def test_what_serves_nothing_cannot_be_rolled_back(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        for number in (0, 1):
            one = await version(connection, number)
            with pytest.raises(NotGated, match="only a trained version that serves"):
                await roll_back(connection, one, reason=TEST, actor="operator")
