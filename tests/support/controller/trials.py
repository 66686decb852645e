"""Make versions on trial and episodes of both arms, an hour ago, and judge them."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from zlib import crc32

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.policies import events_of
from pawl.controller.gating import Gating
from pawl.settings import ControllerSettings
from store.claims import begin_update, consume
from store.records import Arm, SpoolRecord
from store.version_queries import list_versions
from store.version_states import lock_policies, make_candidate
from store.versions import policy_name
from store.write.ingest import Ingester
from tests.support.ledger.lineage import trained
from tests.support.records import ago, call, reward
from trainer.publishing.model_server import Replicas
from trainer.recipes.recipe import GateOptions

RULE = GateOptions(
    mode="gated",
    canary_share=0.4,
    base_share=0.4,
    margin=0.2,
    reward_delay_s=600.0,
    fewest=10,
)
# How long ago what a test does was done, and the seconds in which its episodes began.
HOUR_S = 3600.0
FROM_S, TO_S = 3000.0, 700.0
# Nothing of ours listens there.
AWAY = "http://127.0.0.1:9/v1"
GOOD, BAD = [1.0, 0.9], [0.0, 0.1]
# Episodes of each arm: enough for a clear difference.
MANY = 60


def settings_of(engine: AsyncEngine) -> ControllerSettings:
    """Return the settings of a controller of the engine's database."""
    url = engine.url.render_as_string(hide_password=False)
    return ControllerSettings.model_validate({"database_url": url})


def gating(engine: AsyncEngine, replicas: Replicas) -> Gating:
    return Gating(settings_of(engine), 0.01, replicas)


def gate(engine: AsyncEngine) -> Gating:
    """A controller's that asks no model server."""
    return gating(engine, Replicas([AWAY]))


@asynccontextmanager
async def following(judge: Gating) -> AsyncIterator[None]:
    """Let a controller look again and again."""
    task = asyncio.create_task(judge.follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def look(engine: AsyncEngine, *urls: str, slots: int | None = None) -> None:
    """Let one new controller, of these model servers, look at the policies once."""
    async with Replicas(urls or [AWAY], slots) as replicas:
        await gating(engine, replicas).look(engine)


async def candidate(
    engine: AsyncEngine, *parents: int, rule: GateOptions = RULE, name: str = "m"
) -> None:
    """Make versions with these parents, of which the last waits for its trial."""
    async with engine.begin() as connection:
        await trained(connection, *parents, name=name)
        dumped = rule.model_dump(mode="json")
        await make_candidate(connection, name, len(parents), dumped, reason="probed")


async def pass_time(engine: AsyncEngine) -> None:
    """Let all changes of states have been made an hour ago."""
    async with engine.begin() as connection:
        # As whoever moves traffic does first.
        await lock_policies(connection, ["m"])
        changed = text("UPDATE policies SET changed_at = changed_at - make_interval(secs => :s)")
        await connection.execute(changed, {"s": HOUR_S})


async def live(
    engine: AsyncEngine,
    rewards: Mapping[tuple[Arm, int], Sequence[float]],
    run: str = "a",
    from_s: float = FROM_S,
    many: int = MANY,
    *,
    to_s: float = TO_S,
    are_late: bool = False,
) -> Sequence[SpoolRecord]:
    """Make episodes of arms and their versions, in turn, with these rewards over and over.

    If `are_late`, the rewards are given, and not stored: they are returned.
    """
    records: list[SpoolRecord] = []
    late: list[SpoolRecord] = []
    step = (from_s - to_s) / many
    for number in range(many):
        for place, ((arm, version), values) in enumerate(rewards.items()):
            key = f"{run}-{arm}-{number}"
            served = policy_name("m", version, "m")
            # Of two runs, episodes may begin in the same millisecond.
            began = ago(from_s - step * number, place + 8 * crc32(run.encode()))
            made = call(key, policy_version=version, arm=arm, served_model=served, **began)
            records.append(made)
            late.append(reward(values[number % len(values)], episode=key))
    await Ingester().store(engine, records if are_late else records + late)
    return late


async def states(engine: AsyncEngine) -> dict[int, str]:
    async with engine.connect() as connection:
        return {one.version: one.state for one in await list_versions(connection, "m")}


async def changes(engine: AsyncEngine) -> list[tuple[str, str, str]]:
    """Return what the controller and operators did, oldest first."""
    return [
        (line.version, line.to_state, line.actor)
        for line in await events_of(engine, "m")
        if line.actor in ("controller", "operator")
    ]


async def begin_trial(engine: AsyncEngine, judge: Gating) -> None:
    """Try version 1 as a canary, while the base model serves; no episode has begun yet."""
    await candidate(engine, 0)
    await judge.look(engine)
    await pass_time(engine)


async def on_trial(engine: AsyncEngine, judge: Gating, better: bool = True) -> None:
    """Try version 1, with episodes that suffice for a verdict."""
    await begin_trial(engine, judge)
    mine, others = (GOOD, BAD) if better else (BAD, GOOD)
    await live(engine, {("serving", 0): others, ("canary", 1): mine})


async def next_version(engine: AsyncEngine, number: int, parent: int) -> None:
    """Make one more version of the policy."""
    async with engine.begin() as connection:
        update = await begin_update(connection, "m", parent, {})
        files = f"/m/{number}"
        await consume(connection, update, (), {}, policy="m", version=number, adapter_path=files)


async def next_candidate(
    engine: AsyncEngine, number: int, parent: int, rule: GateOptions = RULE
) -> None:
    """Make one more version, which waits for its trial."""
    await next_version(engine, number, parent)
    async with engine.begin() as connection:
        dumped = rule.model_dump(mode="json")
        await make_candidate(connection, "m", number, dumped, reason="probed")
