"""The trials' benchmark finds when the evidence against what serves sufficed."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.trials.turning import sufficed_at
from store.read.standing import Gated, Promotion, gated, promotion
from store.records import Arm
from tests.support.steward.trials import RULE, TO_S, gate, live, on_trial, pass_time, states

# Episodes of each arm, and the pause between two of them.
EPISODES, EVERY_S = 100, 2.0


async def serving(database_url: str, engine: AsyncEngine) -> tuple[Gated, Promotion]:
    """Where the policy stands once version 1 was promoted by its trial, an hour ago."""
    judge = gate(database_url)
    await on_trial(engine, judge)
    await judge.look(engine)
    await pass_time(engine)
    async with engine.connect() as connection:
        stands, promoted = await gated(connection, "m"), await promotion(connection, "m", 1)
    assert stands is not None
    assert promoted is not None
    return stands, promoted


async def test_it_sufficed_before_the_steward_acted_and_not_before_the_episodes_counted(
    database_url: str, engine: AsyncEngine
) -> None:
    stands, promoted = await serving(database_url, engine)
    bad: dict[tuple[Arm, int], Sequence[float]]
    bad = {("base", 0): [0.9, 1.0], ("serving", 1): [0.1, 0.0]}
    first_s = TO_S + EPISODES * EVERY_S
    await live(engine, bad, "bad", from_s=first_s, many=EPISODES)
    now = datetime.now(UTC)
    stands = Gated(
        now=now - timedelta(seconds=first_s),
        frozen=False,
        serving=stands.serving,
        base_share=stands.base_share,
    )
    sufficed = await sufficed_at(engine, stands, promoted, now)
    assert sufficed is not None
    earliest = now - timedelta(seconds=first_s - RULE.reward_delay_s)
    assert earliest < sufficed < now
    assert (sufficed - stands.now) % timedelta(seconds=1) == timedelta(0)
    # A steward that acts within a second of it has acted on no less.
    late = replace(stands, now=sufficed - timedelta(milliseconds=999))
    found = await sufficed_at(engine, late, promoted, sufficed)
    assert found is not None
    assert late.now <= found <= sufficed
    await gate(database_url).look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}
    # What the ledger says does not depend on who serves by now.
    assert await sufficed_at(engine, stands, promoted, now) == sufficed


async def test_while_it_serves_well_it_never_suffices(
    database_url: str, engine: AsyncEngine
) -> None:
    stands, promoted = await serving(database_url, engine)
    good: dict[tuple[Arm, int], Sequence[float]]
    good = {("base", 0): [0.1, 0.0], ("serving", 1): [0.9, 1.0]}
    await live(engine, good, "good", from_s=TO_S + 60.0, many=30)
    until = stands.now + timedelta(seconds=20)
    assert await sufficed_at(engine, stands, promoted, until) is None
