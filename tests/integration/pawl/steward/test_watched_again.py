"""What serves again after a roll-back, or by hand, is watched by what its own trial showed."""

from collections.abc import Sequence

import pytest
from prometheus_client import generate_latest
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.policies import versions_of
from store.records import Arm
from store.version_states import make_candidate
from tests.integration.conftest import free_port
from tests.integration.pawl.steward.test_serving_again import look
from tests.support.steward.trials import (
    RULE,
    TO_S,
    _settings,
    candidate,
    changes,
    command,
    gate,
    live,
    pass_time,
    states,
    trained_on,
)

__all__ = ["_settings"]

Rewards = dict[tuple[Arm, int], Sequence[float]]
MANY = 100
AWAY = f"http://127.0.0.1:{free_port()}/v1"
BASE, FAIR, BEST = [0.0, 0.1], [0.6, 0.5], [1.0, 0.9]
WATCHED = 'pawl_steward_gate_watched{policy="m"} 1.0'


async def tried_twice(database_url: str, engine: AsyncEngine) -> None:
    """Versions 1 and 2 were promoted by their trials, one after the other."""
    judge = gate(database_url)
    await candidate(engine, 0)
    await judge.look(engine)
    await pass_time(engine)
    first: Rewards = {("serving", 0): BASE, ("canary", 1): FAIR}
    await live(engine, first, "first", many=MANY)
    await judge.look(engine)
    await pass_time(engine)
    async with engine.begin() as connection:
        await trained_on(connection, 2, 1)
        rule = RULE.model_dump(mode="json")
        await make_candidate(connection, "m", 2, rule, reason="probed")
    await judge.look(engine)
    await pass_time(engine)
    second: Rewards = {("base", 0): BASE, ("serving", 1): FAIR, ("canary", 2): BEST}
    await live(engine, second, "second", many=MANY)
    await judge.look(engine)
    await pass_time(engine)
    assert await states(engine) == {0: "published", 1: "published", 2: "serving"}


async def turns_bad(engine: AsyncEngine, number: int) -> None:
    """What the base model gets right by now a version that serves gets wrong."""
    bad: Rewards = {("base", 0): BEST, ("serving", number): BASE}
    await live(engine, bad, f"bad-{number}", from_s=TO_S + 10.0, many=MANY)


async def test_what_serves_again_after_a_roll_back_is_rolled_back_if_it_turns_bad(
    database_url: str, engine: AsyncEngine
) -> None:
    """No trainer runs in any of these tests, and no model server."""
    await tried_twice(database_url, engine)
    await turns_bad(engine, 2)
    await look(database_url, engine, AWAY)
    assert await states(engine) == {0: "published", 1: "serving", 2: "rolled_back"}
    await pass_time(engine)
    as_good: Rewards = {("base", 0): BASE, ("serving", 1): FAIR}
    await live(engine, as_good, "again", many=MANY)
    await look(database_url, engine, AWAY)
    assert (await states(engine))[1] == "serving"
    assert WATCHED in generate_latest().decode()
    assert not any(line.unwatched for line in await versions_of(engine, "m"))
    await turns_bad(engine, 1)
    await look(database_url, engine, AWAY)
    assert await states(engine) == {0: "serving", 1: "rolled_back", 2: "rolled_back"}
    assert (await changes(engine))[-4:] == [
        ("m@2", "rolled_back", "steward"),
        ("m@1", "serving", "steward"),
        ("m@1", "rolled_back", "steward"),
        ("m@0", "serving", "steward"),
    ]


@pytest.mark.usefixtures("_settings")
async def test_what_an_operator_gave_the_traffic_again_is_watched_as_it_was_after_its_trial(
    database_url: str, engine: AsyncEngine
) -> None:
    await tried_twice(database_url, engine)
    assert (await command("promote", "m@1")).exit_code == 0
    await pass_time(engine)
    await turns_bad(engine, 1)
    await look(database_url, engine, AWAY)
    assert (await states(engine))[1] == "rolled_back"
