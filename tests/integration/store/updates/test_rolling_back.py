"""A roll-back gives the traffic to what had it before, and never to what fell or came of it."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from store import version_states
from store.errors import NotGated, RolledBack
from store.read.gates import newest_promoted
from store.version_queries import list_events, version_before
from store.version_states import change_state, make_ready, roll_back
from store.versions import PolicyState
from tests.support.ledger.history import let_events_change
from tests.support.ledger.lineage import promote, set_state, trained
from tests.support.ledger.states import TEST, canary, check_told, states, version


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
            await version_states.set_state(
                connection, "m", 1, "ready", reason=TEST, actor="trainer"
            )
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
        await let_events_change(connection)
        await connection.execute(text("DELETE FROM policy_events WHERE version = 1"))
        assert (await version_before(connection, await version(connection, 2))).version == 1
        assert await newest_promoted(connection, "m") == 2


async def test_what_serves_nothing_cannot_be_rolled_back(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        for number in (0, 1):
            one = await version(connection, number)
            with pytest.raises(NotGated, match="only a trained version that serves"):
                await roll_back(connection, one, reason=TEST, actor="operator")
