"""A policy's line starts again at an older version: what ends, what is free, what is left out."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store import claims, version_states
from store.claim_query import ClaimRule
from store.claims import Claim, expire_episodes, oldest_trainable_version
from store.deleting import delete_episode
from store.errors import ClaimSpoilt, RolledBack, StateChanged, UnknownPolicy, WrongVersionState
from store.read.gates import read_gated_policy
from store.records import SpoolRecord
from store.retraining import Retrained, retrain
from store.version_queries import (
    list_servable,
    numbered_version,
    rollback_target,
    version_to_train_from,
)
from store.version_states import begin_canary
from tests.support.ledger.episodes import keys, reasons, store
from tests.support.ledger.lineage import load, promote
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward

RULE = ClaimRule(policy="m", group_size=2, groups=2, max_age_s=1e9)
RECIPE = {"claim": {"max_staleness": 64}}


async def wave(engine: AsyncEngine, number: int, sampled_by: int) -> None:
    """Store four scored episodes of two tasks, `w<number>/e<i>`, for one update."""
    records: list[SpoolRecord] = []
    for place in range(4):
        key = f"w{number}/e{place}"
        records.append(call(key, task=f"t{number}{place % 2}", policy_version=sampled_by))
        records.append(reward(place / 2, at=number, episode=key))
    await store(engine, *records)


async def claim_from(engine: AsyncEngine, parent: int) -> Claim:
    claim = await claimed(engine, RULE, parent, RECIPE)
    assert claim is not None
    return claim


async def line(engine: AsyncEngine, versions: int) -> None:
    """Train and promote versions, one after the other, each on the wave that it is named after."""
    for number in range(1, versions + 1):
        await wave(engine, number, number - 1)
        claim = await claim_from(engine, number - 1)
        await consume_all(engine, claim, version=number, baselines={"after": number})
        async with engine.begin() as connection:
            await promote(connection, "m", number, reason="better", actor="trainer")


async def again(engine: AsyncEngine, version: int, *without: str) -> Retrained:
    async with engine.begin() as connection:
        return await started(connection, version, *without)


async def started(connection: AsyncConnection, version: int, *without: str) -> Retrained:
    out = await ids(connection, *without)
    return await retrain(connection, "m", version, out, reason="wrong rewards", actor="operator")


async def ids(connection: AsyncConnection, *names: str) -> list[UUID]:
    query = text("SELECT id FROM episodes WHERE key = ANY(:keys)")
    return list((await connection.execute(query, {"keys": list(names)})).scalars())


async def rows(engine: AsyncEngine, query: str) -> Sequence[Any]:
    async with engine.connect() as connection:
        return (await connection.execute(text(query))).all()


async def states(engine: AsyncEngine) -> dict[int, tuple[str, bool]]:
    """Return each version's state, and whether it ended."""
    query = "SELECT version, state, ended_at IS NOT NULL FROM policies ORDER BY version"
    return {row[0]: (row[1], row[2]) for row in await rows(engine, query)}


async def test_later_versions_end_and_their_episodes_are_claimed_again(
    engine: AsyncEngine,
) -> None:
    await line(engine, 3)
    retrained = await again(engine, 1)
    assert (retrained.serves, retrained.served, retrained.ended) == ("m@1", "m@3", 2)
    assert (retrained.freed, retrained.left_out) == ({"trained": 8}, 0)
    assert retrained.max_staleness == 64
    assert await states(engine) == {
        0: ("retired", False),
        1: ("serving", False),
        2: ("retired", True),
        3: ("retired", True),
    }
    assert set(await reasons(engine)) == {f"w1/e{place}" for place in range(4)}
    # What the old line had trained on is trained again, once.
    for number in (4, 5):
        claim = await claim_from(engine, 1 if number == 4 else 4)
        await consume_all(engine, claim, version=number)
    assert len(await reasons(engine)) == 12
    assert await claimed(engine, RULE, 5) is None
    by_state = "SELECT state, count(*) FROM updates GROUP BY state"
    assert dict(await rows(engine, by_state)) == {"done": 3, "abandoned": 2}


async def test_event_of_a_retraining_has_its_reason_and_figures(engine: AsyncEngine) -> None:
    await line(engine, 2)
    await again(engine, 1, "w2/e0")
    newest = "SELECT version, from_state, to_state, reason, actor, evidence FROM policy_events"
    event = (await rows(engine, f"{newest} WHERE evidence IS NOT NULL"))[0]
    assert tuple(event)[:5] == (
        *(1, "retired", "serving"),
        *("the line starts again at m@1: wrong rewards", "operator"),
    )
    assert event.evidence["retrain"]["freed"] == {"trained": 4}
    assert event.evidence["retrain"]["left_out"] == 1


async def test_episodes_left_out_of_a_retraining_are_neither_claimed_nor_compared_with(
    engine: AsyncEngine,
) -> None:
    await line(engine, 2)
    await store(engine, call("late", task="t", policy_version=2), reward(1, episode="late"))
    retrained = await again(engine, 1, "w2/e0", "w2/e2", "late")
    assert (retrained.left_out, retrained.learned) == (3, 0)
    assert await reasons(engine) == dict.fromkeys([f"w1/e{place}" for place in range(4)]) | (
        dict.fromkeys(["w2/e0", "w2/e2", "late"], "left_out")
    )
    # Two of the task's four members are left, and no earlier member joins them.
    await store(engine, call("new", task="t20", policy_version=1), reward(0, episode="new"))
    alone = ClaimRule(policy="m", group_size=3, groups=1, max_age_s=0, fewest=1)
    claim = await claimed(engine, alone, 1, RECIPE)
    assert claim is not None
    [group] = [group for group in claim.groups if group.task == "t20"]
    assert ([one.key for one in group.episodes], group.earlier) == (["new"], ())


async def test_second_retraining_leaves_out_the_same_episodes(engine: AsyncEngine) -> None:
    await line(engine, 2)
    await again(engine, 1, "w2/e0")
    retrained = await again(engine, 0)
    assert retrained.freed == {"trained": 4}
    assert (await reasons(engine)) == {"w2/e0": "left_out"}


async def test_repeated_retraining_changes_nothing_more(engine: AsyncEngine) -> None:
    await line(engine, 2)
    await again(engine, 1, "w2/e0")
    before = await states(engine), await reasons(engine)
    retrained = await again(engine, 1, "w2/e0")
    assert (retrained.ended, retrained.freed, retrained.left_out) == (0, {}, 0)
    assert (await states(engine), await reasons(engine)) == before


async def test_left_out_episodes_that_the_start_version_was_trained_on_are_counted(
    engine: AsyncEngine,
) -> None:
    await line(engine, 2)
    retrained = await again(engine, 1, "w1/e0", "w2/e0")
    assert (retrained.learned, retrained.left_out) == (1, 1)
    assert (await reasons(engine))["w1/e0"] is None


async def test_retraining_frees_stale_but_not_damaged_or_deleted_episodes(
    engine: AsyncEngine,
) -> None:
    """Stale ones are free again; what was set aside, or deleted since, stays consumed."""
    await line(engine, 2)
    await store(engine, call("old", task="o", policy_version=0))
    async with engine.begin() as connection:
        strict = msgspec.structs.replace(RULE, max_staleness=0, max_age_s=1e-6)
        assert await expire_episodes(connection, strict, 2, RECIPE) == {"stale": 1}
        [gone] = await ids(connection, "w2/e1")
        receipt = await delete_episode(connection, gone)
        assert receipt is not None
        aside = "UPDATE consumptions SET trained = false, reason = 'damaged' WHERE episode_id = :id"
        [damaged] = await ids(connection, "w2/e2")
        await connection.execute(text(aside), {"id": damaged})
        quarantined = "UPDATE episode_policies SET claimable = false WHERE episode_id = :id"
        await connection.execute(text(quarantined), {"id": damaged})
    retrained = await again(engine, 1)
    assert retrained.freed == {"trained": 2, "stale": 1}


async def test_retraining_abandons_the_running_update_and_its_claim(engine: AsyncEngine) -> None:
    await line(engine, 2)
    await wave(engine, 3, 2)
    under_way = await claim_from(engine, 2)
    retrained = await again(engine, 1, "w3/e0")
    assert retrained.left_out == 1
    with pytest.raises(ClaimSpoilt, match="trained from m@2, which has failed since, or has ended"):
        await consume_all(engine, under_way, version=3)
    async with engine.begin() as connection:
        assert await claims.release(connection, under_way.update_id, "given up") == 0
    assert (await reasons(engine))["w3/e0"] == "left_out"
    assert (await states(engine)).keys() == {0, 1, 2}
    assert len(keys(await claim_from(engine, 1))) == 4


async def test_update_from_an_ended_version_is_refused(engine: AsyncEngine) -> None:
    """A trainer may have looked up its parent just before, and claim just after."""
    await line(engine, 2)
    await again(engine, 1)
    late = await claim_from(engine, 2)
    with pytest.raises(ClaimSpoilt, match="trained from m@2, which has failed since, or has ended"):
        await consume_all(engine, late, version=3)
    async with engine.begin() as connection:
        assert await claims.release(connection, late.update_id, "it came too late") == 4
    assert set(keys(await claim_from(engine, 1))) == set(keys(late))


async def test_retraining_retires_waiting_and_canary_versions(
    engine: AsyncEngine,
) -> None:
    await line(engine, 2)
    for number in (3, 4, 5):
        await wave(engine, number, 2)
        await consume_all(engine, await claim_from(engine, number - 1), version=number)
        if number < 5:
            async with engine.begin() as connection:
                await load(connection, "m", number, {}, reason="probed", actor="trainer")
        if number == 3:
            async with engine.begin() as connection:
                tried = await numbered_version(connection, "m", 3)
                assert tried is not None
                await begin_canary(connection, tried, 0.1, reason="tried", actor="controller")
    await again(engine, 1)
    assert await states(engine) == {
        0: ("retired", False),
        1: ("serving", False),
        2: ("retired", True),
        3: ("retired", True),
        4: ("retired", True),
        5: ("retired", True),
    }
    async with engine.begin() as connection:
        assert (await version_to_train_from(connection, "m")).version == 1
        # Episodes keep the canary; nobody has the others, and a trainer cannot publish one.
        live = await list_servable(connection, "m")
        assert [one.version for one in live] == [0, 1, 2, 3]
        with pytest.raises(StateChanged, match="m@5 is 'retired', and cannot become 'loaded'"):
            await load(connection, "m", 5, {}, reason="probed", actor="trainer")


async def test_ended_version_never_serves_again(engine: AsyncEngine) -> None:
    await line(engine, 3)
    await again(engine, 1)
    async with engine.begin() as connection:
        with pytest.raises(RolledBack, match="ended when the policy's line started again"):
            await version_states.promote(connection, "m", 3, reason="back", actor="operator")
    await consume_all(engine, await claim_from(engine, 1), version=4)
    async with engine.begin() as connection:
        await promote(connection, "m", 4, reason="better", actor="trainer")
        assert (await rollback_target(connection, "m")).version == 1
        serving = await numbered_version(connection, "m", 1)
        assert serving is not None
    async with engine.begin() as connection:
        with pytest.raises(DBAPIError, match="ended_for_good"):
            await connection.execute(
                text("UPDATE policies SET state = 'serving' WHERE version = 3")
            )


@pytest.mark.parametrize(
    ("was", "start", "control"),
    [
        # The control is older than the start, and stays.
        (2, 4, 2),
        # It ends: what served before the start is the control, or the base model.
        (3, 2, 1),
        (3, 1, 0),
        # It is the start itself.
        (3, 3, 2),
    ],
)
async def test_control_after_retraining_is_a_version_that_did_not_end(
    engine: AsyncEngine, was: int, start: int, control: int
) -> None:
    for number in range(1, 6):
        await wave(engine, number, number - 1)
        await consume_all(engine, await claim_from(engine, number - 1), version=number)
        async with engine.begin() as connection:
            await promote(connection, "m", number, rule={"control_share": 0.05})
    async with engine.begin() as connection:
        why: Any = {"reason": "for the test", "actor": "controller"}
        await version_states.move_control(connection, "m", was, 0.05, **why)
    for _ in range(2):
        await again(engine, start)
        watched = await rows(engine, "SELECT version, share FROM policies WHERE share IS NOT NULL")
        assert watched == [(control, 0.05)]
    async with engine.connect() as connection:
        stands = await read_gated_policy(connection, "m")
    assert stands is not None
    assert stands.control is not None
    assert stands.control.since >= stands.serving.since


async def test_ended_versions_do_not_count_for_staleness(engine: AsyncEngine) -> None:
    await line(engine, 4)
    async with engine.connect() as connection:
        assert await oldest_trainable_version(connection, "m", 4, 1) == 3
    await again(engine, 1)
    async with engine.connect() as connection:
        assert await oldest_trainable_version(connection, "m", 1, 1) == 0
    await consume_all(engine, await claim_from(engine, 1), version=5)
    async with engine.begin() as connection:
        await promote(connection, "m", 5, reason="better", actor="trainer")
        # Version 1 is one version before the fifth, so all that the ended ones sampled is fresh.
        assert await oldest_trainable_version(connection, "m", 5, 1) == 1


async def test_claim_after_retraining_has_the_start_versions_moving_baselines(
    engine: AsyncEngine,
) -> None:
    await line(engine, 3)
    await again(engine, 1)
    assert (await claim_from(engine, 1)).baselines == {"after": 1}


async def test_receipt_of_a_deletion_names_ended_versions(engine: AsyncEngine) -> None:
    await line(engine, 2)
    await again(engine, 1, "w2/e0")
    async with engine.begin() as connection:
        for key in ("w2/e0", "w2/e1"):
            [whole] = await ids(connection, key)
            receipt = await delete_episode(connection, whole)
            assert receipt is not None
            assert receipt.trained == ("m@2",)


async def test_start_version_that_cannot_serve_is_refused_and_changes_nothing(
    engine: AsyncEngine,
) -> None:
    await store(engine, call("e"))
    with pytest.raises(WrongVersionState, match="nothing was trained for policy 'm' yet"):
        await again(engine, 0)
    await line(engine, 2)
    await wave(engine, 3, 2)
    await consume_all(engine, await claim_from(engine, 2), version=3)
    before = await states(engine), await reasons(engine)
    with pytest.raises(UnknownPolicy):
        await again(engine, 7)
    with pytest.raises(StateChanged, match=r"m@3 is 'written', and cannot become 'serving'"):
        await again(engine, 3)
    async with engine.begin() as connection:
        await version_states.promote(connection, "m", 1, reason="back", actor="operator")
        serving = await numbered_version(connection, "m", 1)
        assert serving is not None
        await version_states.roll_back(connection, serving, reason="worse", actor="operator")
    with pytest.raises(RolledBack):
        await again(engine, 1)
    assert (await reasons(engine)) == before[1]


async def test_retraining_killed_before_its_commit_changes_nothing(engine: AsyncEngine) -> None:
    await line(engine, 3)
    before = await states(engine), await reasons(engine)

    async def killed() -> None:
        async with engine.begin() as connection:
            await started(connection, 1, "w2/e0")
            own = await connection.scalar(text("SELECT pg_backend_pid()"))
            async with engine.connect() as other:
                await other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": own})
            await connection.execute(text("SELECT 1"))

    with pytest.raises(DBAPIError):
        await killed()
    assert (await states(engine), await reasons(engine)) == before
    assert (await again(engine, 1)).freed == {"trained": 8}
