"""Make versions that are compared, with the episodes of both arms an hour ago, and judge them."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from zlib import crc32

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controller.comparison import Comparison
from controller.evaluating import Evaluate, Evaluations
from controller.gate import Gate
from controller.run import look_forever, working
from pawl.commands.policies import read_event_lines
from pawl.settings import ControllerSettings
from store.claims import begin_update, record_update
from store.read.gates import VersionInRole
from store.records import Arm, SpoolRecord
from store.version_queries import list_versions
from store.version_states import lock_policies
from store.versions import policy_name
from store.write.ingest import Ingester
from tests.support.ledger.history import let_events_change
from tests.support.ledger.lineage import load, promote, trained
from tests.support.records import ago, call, reward
from trainer.recipes.recipe import PublishOptions, Recipe

# What a trainer's recipe says, as it is stored with a version.
RULE: Final[Mapping[str, Any]] = Recipe(
    publish=PublishOptions(mode="canary", control_share=0.3, margin=0.2, reward_delay_s=600.0)
).judged_by
IMMEDIATE: Final = {**RULE, "mode": "immediate"}
# How long ago what a test does was done, and the seconds in which its episodes began.
HOUR_S = 3600.0
FROM_S, TO_S = 3000.0, 700.0
GOOD, BAD = [1.0, 0.9], [0.0, 0.1]
# Worse than the other by a little, of which so few episodes show nothing.
LESS, MORE = [0.0, 1.0, 0.4], [0.0, 1.0, 0.6]
# Episodes of each arm: enough for a clear difference.
MANY = 80


def settings_of(engine: AsyncEngine) -> ControllerSettings:
    """Return the settings of a controller of the engine's database."""
    url = engine.url.render_as_string(hide_password=False)
    return ControllerSettings.model_validate({"database_url": url})


async def never(
    candidate: VersionInRole, serving: VersionInRole, rule: PublishOptions
) -> Comparison:
    """Evaluate without coming to an end."""
    await asyncio.Event().wait()
    raise AssertionError


def controller(engine: AsyncEngine, evaluate: Evaluate = never) -> Gate:
    """Return what decides in a controller that was just started."""
    return Gate(Evaluations(evaluate))


@asynccontextmanager
async def following(engine: AsyncEngine, judge: Gate) -> AsyncIterator[None]:
    """Let a controller look again and again."""
    async with working([look_forever(settings_of(engine), 0.01, "gate", judge.look)]):
        yield


async def look(engine: AsyncEngine) -> None:
    """Let one new controller look at the policies once."""
    await controller(engine).look(engine)


async def next_version(
    engine: AsyncEngine, number: int, parent: int, rule: Mapping[str, Any] | None = None
) -> None:
    """Make one more version; with a rule it is loaded, and waits to be judged by that."""
    async with engine.begin() as connection:
        update = await begin_update(connection, "m", parent, {})
        files = f"/m/{number}"
        await record_update(
            connection, update, (), {}, policy="m", version=number, adapter_path=files
        )
        if rule is not None:
            await load(connection, "m", number, rule, reason="probed", actor="trainer")


async def loaded(
    engine: AsyncEngine, *parents: int, rule: Mapping[str, Any] = RULE, name: str = "m"
) -> None:
    """Make versions with these parents, of which the last waits to be judged."""
    async with engine.begin() as connection:
        await trained(connection, *parents, name=name)
        await load(connection, name, len(parents), rule, reason="probed", actor="trainer")


async def serves(
    engine: AsyncEngine, number: int, parent: int, rule: Mapping[str, Any] = IMMEDIATE
) -> None:
    """Make one more version, and give it the traffic as a trainer does, an hour ago."""
    await next_version(engine, number, parent, rule)
    async with engine.begin() as connection:
        await promote(connection, "m", number, reason="it is loaded", actor="trainer")
    await pass_time(engine)


async def pass_time(engine: AsyncEngine) -> None:
    """Let all changes of states have been made an hour earlier."""
    async with engine.begin() as connection:
        # As whoever moves traffic does first.
        await lock_policies(connection, ["m"])
        await let_events_change(connection)
        for table, column in (("policies", "changed_at"), ("policy_events", "at")):
            earlier = text(f"UPDATE {table} SET {column} = {column} - make_interval(secs => :s)")
            await connection.execute(earlier, {"s": HOUR_S})


async def live(
    engine: AsyncEngine,
    rewards: Mapping[tuple[Arm, int], Sequence[float]],
    run: str = "a",
    from_s: float = FROM_S,
    many: int = MANY,
    *,
    to_s: float = TO_S,
    are_late: bool = False,
    task: str | None = None,
) -> Sequence[SpoolRecord]:
    """Make episodes of arms and their versions, in turn, with these rewards over and over.

    If `are_late`, the rewards are given, and not stored: they are returned.
    """
    records: list[SpoolRecord] = []
    late: list[SpoolRecord] = []
    step = (from_s - to_s) / many
    for number in range(many):
        for place, ((arm, version), values) in enumerate(rewards.items()):
            key = f"{run}-{arm}-{version}-{number}"
            served = policy_name("m", version, "m")
            # Of two runs, episodes may begin in the same millisecond.
            began = ago(from_s - step * number, place + 8 * crc32(run.encode()))
            made = call(
                key, policy_version=version, arm=arm, served_model=served, task=task, **began
            )
            records.append(made)
            said = reward(values[number % len(values)], episode=key)
            late.append(msgspec.structs.replace(said, at=made.started_at))
    await Ingester().store(engine, records if are_late else records + late)
    return late


async def states(engine: AsyncEngine) -> dict[int, str]:
    async with engine.connect() as connection:
        return {one.version: one.state for one in await list_versions(connection, "m")}


async def shares(engine: AsyncEngine) -> dict[int, float]:
    """Return the versions with a share of new episodes: a canary, and the control."""
    async with engine.connect() as connection:
        found = await list_versions(connection, "m")
    return {one.version: one.share for one in found if one.share is not None}


async def changes(engine: AsyncEngine) -> list[tuple[str, str]]:
    """Return what the controller did, oldest first."""
    return [
        (line.version, line.to_state)
        for line in await read_event_lines(engine, "m")
        if line.actor == "controller"
    ]


async def begin_trial(engine: AsyncEngine, judge: Gate, rule: Mapping[str, Any] = RULE) -> None:
    """Try version 1 as a canary, while the base model serves; no episode has begun yet."""
    await loaded(engine, 0, rule=rule)
    await judge.look(engine)
    await pass_time(engine)


async def on_trial(
    engine: AsyncEngine,
    judge: Gate,
    rule: Mapping[str, Any] = RULE,
    *,
    mine: Sequence[float] = GOOD,
    others: Sequence[float] = BAD,
) -> None:
    """Try version 1, with episodes of these rewards; by default they suffice for a verdict."""
    await begin_trial(engine, judge, rule)
    await live(engine, {("serving", 0): others, ("canary", 1): mine})
