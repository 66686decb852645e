"""Versions that serve untried, in mode "immediate": the controller rolls back what is worse."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import generate_latest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from pawl.commands.policies import events_of, versions_of, versions_table
from pawl.controller.gating import Gating
from store import version_states
from store.claim_query import rolled_back_episodes
from store.records import Arm
from store.version_queries import list_versions
from store.write.ingest import Ingester
from tests.support.controller.trials import (
    BAD,
    GOOD,
    changes,
    live,
    look,
    next_version,
    on_trial,
    pass_time,
    states,
)
from tests.support.ledger.lineage import promote, set_state, trained
from trainer.recipes.recipe import GateOptions

RULE = GateOptions(base_share=0.4, margin=0.2, reward_delay_s=600.0)
# Episodes of each version began in so many seconds, one version after the other.
FROM_S, EACH_S = 3400.0, 400.0
Rewards = tuple[Sequence[float], Sequence[float]]


async def serves(engine: AsyncEngine, number: int, rule: GateOptions = RULE) -> None:
    """Let a version get the traffic as a trainer gives it."""
    async with engine.begin() as connection:
        if rule.is_watched:
            dumped = rule.model_dump(mode="json")
            await version_states.watch(connection, "m", number, dumped, rule.base_share)
        await promote(connection, "m", number, reason="it is ready", actor="trainer")


async def served(
    engine: AsyncEngine, *rewards: Rewards, rule: GateOptions = RULE, are_late: bool = False
) -> list[Any]:
    """Versions that served one after the other, with the rewards of each and of the base then."""
    async with engine.begin() as connection:
        await trained(connection, *range(len(rewards)))
    late: list[Any] = []
    for number, (mine, base) in enumerate(rewards, 1):
        await serves(engine, number, rule)
        late += await gives(engine, number, mine, base, are_late=are_late)
    await pass_time(engine)
    return late


async def gives(
    engine: AsyncEngine,
    number: int,
    mine: Sequence[float],
    base: Sequence[float],
    *,
    are_late: bool = False,
) -> Sequence[Any]:
    """Episodes begun while a version served."""
    from_s = FROM_S - EACH_S * (number - 1)
    arms: dict[tuple[Arm, int], Sequence[float]] = {("serving", number): mine}
    if base:
        arms["base", 0] = base
    return await live(
        engine,
        arms,
        str(number),
        from_s=from_s,
        to_s=from_s - EACH_S + 10,
        are_late=are_late,
    )


async def test_version_that_is_worse_than_the_one_before_it_is_rolled_back(
    engine: AsyncEngine, judge: Gating
) -> None:
    """No trainer runs in any of these tests, and no model server."""
    await served(engine, (GOOD, BAD), (BAD, BAD))
    await judge.look(engine)
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}
    assert await changes(engine) == [
        ("m@2", "rolled_back", "controller"),
        ("m@1", "serving", "controller"),
    ]
    [lost] = [line for line in await events_of(engine, "m") if line.to_state == "rolled_back"]
    assert "since version 2 is less far above the base model" in lost.reason
    assert isinstance(lost.evidence, dict)
    found = lost.evidence["watched"]
    assert (found["roll_back"], found["since"]) == (True, 2)
    assert found["wealth"] >= found["needed"] == 20
    assert found["lead"] == pytest.approx(0.0, abs=0.05)
    assert found["lead_before"] == pytest.approx(0.9, abs=0.05)
    assert found["arms"]["serving"]["mean"] == pytest.approx(0.05)
    # Nothing more happens, and what serves again is not rolled back for what was before.
    for _ in range(2):
        await judge.look(engine)
        await look(engine)
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}
    assert 'pawl_controller_gate_watched{policy="m"} 0.0' in generate_latest().decode()


async def test_rewards_outside_of_the_range_are_shown_of_what_serves_untried(
    engine: AsyncEngine, judge: Gating
) -> None:
    await served(engine, ([90.0, 0.5], [1.0, 0.0]))
    with capture_logs() as logs:
        await judge.look(engine)
        await judge.look(engine)
    [warning] = [one for one in logs if one["event"] == "rewards_clipped"]
    assert (warning["judged"], list(warning["shares"])) == ("watch", ["serving"])
    shown = 'pawl_controller_gate_clipped_share{arm="serving",judged="watch",policy="m"}'
    assert shown in generate_latest().decode()


async def test_version_that_turns_bad_as_it_serves_is_rolled_back(
    engine: AsyncEngine, judge: Gating
) -> None:
    await served(engine, (GOOD, BAD), (GOOD, BAD))
    await judge.look(engine)
    assert (await states(engine))[2] == "serving"
    assert 'pawl_controller_gate_watched{policy="m"} 1.0' in generate_latest().decode()
    await live(engine, {("base", 0): GOOD, ("serving", 2): BAD}, "turns", from_s=2500, to_s=800)
    await look(engine)
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}


async def test_world_that_gets_worse_for_all_rolls_nothing_back(engine: AsyncEngine) -> None:
    await served(engine, ([1.0, 0.9], [0.6, 0.5]), ([0.5, 0.4], [0.1, 0.0]))
    await look(engine)
    assert await states(engine) == {0: "published", 1: "published", 2: "serving"}


async def test_first_version_is_compared_with_the_base_model(engine: AsyncEngine) -> None:
    await served(engine, (BAD, GOOD))
    await look(engine)
    assert await states(engine) == {0: "serving", 1: "rolled_back"}


async def test_version_without_a_base_share_is_not_watched_and_the_table_says_why(
    engine: AsyncEngine,
) -> None:
    await served(engine, (GOOD, BAD), (BAD, GOOD), rule=GateOptions())
    await look(engine)
    assert await states(engine) == {0: "published", 1: "published", 2: "serving"}
    assert not await changes(engine)
    lines = await versions_of(engine, "m")
    assert [line.version for line in lines if line.unwatched] == ["m@2"]
    caption = str(versions_table(lines).caption)
    assert caption.startswith("no reward rolls m@2 back: ")
    assert "set gate.base_share" in caption
    assert 'pawl_controller_gate_watched{policy="m"} 0.0' in generate_latest().decode()


async def test_version_before_which_the_base_had_no_share_counts_as_unwatched(
    engine: AsyncEngine,
) -> None:
    """The recipe gives a share from the second version on."""
    async with engine.begin() as connection:
        await trained(connection, *range(3))
    watched = []
    for number, rule in ((1, GateOptions()), (2, RULE), (3, RULE)):
        await serves(engine, number, rule)
        if number == 2:
            # None of its episodes counts yet.
            await look(engine)
            page = generate_latest().decode()
            watched.append('pawl_controller_gate_watched{policy="m"} 1.0' in page)
        await gives(engine, number, GOOD, BAD if rule.is_watched else [])
        if number > 1:
            await pass_time(engine)
            await look(engine)
            page = generate_latest().decode()
            watched.append('pawl_controller_gate_watched{policy="m"} 1.0' in page)
    assert watched == [False, False, True]


async def test_versions_made_of_a_bad_one_go_with_it_and_are_not_trained_on(
    engine: AsyncEngine,
) -> None:
    """Before any episode of a bad version counts, others have followed it."""
    await served(engine, (GOOD, BAD), (BAD, GOOD), (BAD, GOOD), (BAD, GOOD))
    async with engine.begin() as connection:
        await set_state(connection, "m", 2, "retired", reason="idle", actor="trainer")
    await look(engine)
    assert await states(engine) == {
        0: "published",
        1: "serving",
        2: "retired",
        3: "rolled_back",
        4: "rolled_back",
    }
    async with engine.connect() as connection:
        lost = {v.version for v in await list_versions(connection, "m") if v.rolled_back}
        unfit = await rolled_back_episodes(connection, "m", 10_000)
        query = text("SELECT DISTINCT version FROM episode_policies WHERE episode_id = ANY(:ids)")
        versions = set((await connection.execute(query, {"ids": unfit})).scalars())
    assert lost == versions == {2, 3, 4}
    told = [(line.version, line.to_state) for line in await events_of(engine, "m")][-4:]
    assert set(told) == {
        ("m@2", "retired"),
        ("m@3", "rolled_back"),
        ("m@4", "rolled_back"),
        ("m@1", "serving"),
    }


async def test_version_after_a_roll_back_is_watched_again(
    engine: AsyncEngine, judge: Gating
) -> None:
    await served(engine, (GOOD, BAD), (BAD, GOOD))
    await judge.look(engine)
    await next_version(engine, 3, 1)
    await serves(engine, 3)
    await gives(engine, 3, BAD, GOOD)
    await pass_time(engine)
    await judge.look(engine)
    assert await states(engine) == {
        0: "published",
        1: "serving",
        2: "rolled_back",
        3: "rolled_back",
    }


@pytest.mark.parametrize("mode", ["immediate", "gated"])
async def test_late_rewards_count_in_a_watch_before_long(
    engine: AsyncEngine, judge: Gating, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Rewards that were given in time waited for the database, with a proxy."""
    if mode == "gated":
        await on_trial(engine, judge)
        await judge.look(engine)
        await pass_time(engine)
        falls = {("base", 0): GOOD, ("serving", 1): BAD}
        late = await live(engine, falls, "late", are_late=True)
        number = 1
    else:
        late = await served(engine, (GOOD, BAD), (BAD, GOOD), are_late=True)
        number = 2
    await judge.look(engine)
    await Ingester().store(engine, late)
    await judge.look(engine)
    assert (await states(engine))[number] == "serving"
    monkeypatch.setattr("pawl.controller.watching.READ_AGAIN", timedelta(0))
    # A look reads an hour of episodes again.
    for _ in range(4):
        await judge.look(engine)
    assert (await states(engine))[number] == "rolled_back"
