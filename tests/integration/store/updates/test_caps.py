"""One API key, or one task, has no more of an update than its share; what is more waits."""

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.records import SpoolRecord
from store.updates.choice import capped, find_ready
from store.updates.claims import Claim
from store.updates.ready import ClaimRule
from store.updates.signal import waiting_updates
from store.version_states import ensure_base
from store.write.ingest import ingest
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward
from trainer.recipes.recipe import parse_recipe
from trainer.updates.expiring import Expiring
from trainer.updates.plan import claim_rule

# Rewards in these tests were stated long ago.
PATIENT = 1e9
NOW = 1e-6
MINUTES = 600.0
SINGLE = ClaimRule(
    policy="m", group_size=1, groups=8, smallest_group=1, max_age_s=PATIENT, most_of_key=0.5
)
PAIRS = msgspec.structs.replace(SINGLE, group_size=2, smallest_group=2, groups=4)


async def store(engine: AsyncEngine, *records: SpoolRecord) -> None:
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        await ingest(connection, list(records))


async def episodes(engine: AsyncEngine, key: str | None, *names: str, **fields: Any) -> None:
    """Store scored episodes of a key, each of a task of its own, the later ones fresher."""
    records: list[SpoolRecord] = []
    for number, name in enumerate(names):
        records.append(call(name, api_key=key, **{"task": f"task-{name}"} | fields))
        records.append(reward(float(number % 2), episode=name, at=number))
    await store(engine, *records)


def named(prefix: str, count: int, start: int = 0) -> list[str]:
    return [f"{prefix}{number:03}" for number in range(start, start + count)]


def held(claim: Claim | None) -> list[str]:
    return [] if claim is None else [e.key for g in claim.groups for e in g.episodes]


def firsts(claim: Claim | None) -> str:
    return "".join(sorted(key[0] for key in held(claim)))


def rule(of: ClaimRule = SINGLE, **changes: Any) -> ClaimRule:
    return msgspec.structs.replace(of, **changes)


async def ready(engine: AsyncEngine, of: ClaimRule, **options: Any) -> int:
    async with engine.begin() as connection:
        return len(await find_ready(connection, of, 0, **options))


async def trained(engine: AsyncEngine, of: ClaimRule) -> Claim | None:
    """Claim what there is and consume it; what is ready and what is claimed are the same."""
    expected = await ready(engine, of)
    claim = await claimed(engine, of)
    assert len(held(claim)) == expected
    if claim is not None:
        await consume_all(engine, claim)
    return claim


async def test_a_flooding_key_has_its_share_of_each_of_many_updates(engine: AsyncEngine) -> None:
    flood, calm = named("flood", 60), named("calm", 24)
    await episodes(engine, "k1", *flood)
    spent: list[str] = []
    for number in range(6):
        await episodes(engine, "k2", *calm[4 * number :][:4])
        claim = await trained(engine, SINGLE)
        assert firsts(claim) == "ccccffff"
        spent += held(claim)
    # Nobody else waits now. The flood goes on by half a step, if it waited long enough for one.
    assert await trained(engine, rule(max_age_s=MINUTES)) is None
    while (claim := await trained(engine, rule(max_age_s=NOW))) is not None:
        assert 0 < len(held(claim)) <= 4
        spent += held(claim)
    assert Counter(spent) == Counter(flood + calm)


async def test_a_key_that_is_alone_in_the_ledger_has_whole_updates(engine: AsyncEngine) -> None:
    await episodes(engine, "k1", *named("f", 20))
    assert len(held(await trained(engine, SINGLE))) == 8
    assert len(held(await trained(engine, SINGLE))) == 8
    await episodes(engine, "k2", "c")
    assert await trained(engine, SINGLE) is None


async def test_calls_without_a_key_are_of_one_key(engine: AsyncEngine) -> None:
    await episodes(engine, None, *named("f", 20))
    assert len(held(await trained(engine, SINGLE))) == 8
    await episodes(engine, "k2", *named("c", 20))
    assert firsts(await trained(engine, SINGLE)) == "ccccffff"


async def test_what_is_capped_does_not_make_one_small_update_after_the_other(
    engine: AsyncEngine,
) -> None:
    of = rule(max_age_s=MINUTES)
    await episodes(engine, "k1", *named("f", 40))
    await episodes(engine, "k2", "c0")
    assert firsts(await trained(engine, of)) == "cffff"
    assert await trained(engine, of) is None
    # Another that has waited takes it along; it does not wait for the flood.
    await episodes(engine, "k2", "c1")
    assert firsts(await trained(engine, of)) == "cffff"
    assert await trained(engine, of) is None
    async with engine.begin() as connection:
        earlier = "UPDATE updates SET claimed_at = claimed_at - interval '601 s'"
        await connection.execute(text(earlier))
    assert firsts(await trained(engine, of)) == "ffff"


async def test_an_update_that_waited_keeps_to_shares_of_what_it_takes(engine: AsyncEngine) -> None:
    await episodes(engine, "k1", *named("f", 40))
    await episodes(engine, "k2", *named("c", 12))
    assert await ready(engine, rule(most_groups=32), takes_most=True) == 24
    assert await ready(engine, rule(most_groups=32)) == 8


async def test_a_task_has_its_share_of_single_episodes(engine: AsyncEngine) -> None:
    await episodes(engine, "k1", *named("often", 20), task="often")
    await episodes(engine, "k1", *named("seldom", 10))
    of = rule(most_of_key=1.0, most_of_task=0.25)
    assert firsts(await trained(engine, of)) == "ooss" + "s" * 4
    async with engine.connect() as connection:
        assert await capped(connection, of, 0) == {"task": 18 - 2}


async def test_groups_are_formed_without_who_is_full(engine: AsyncEngine) -> None:
    """Whoever adds to the tasks of others does not keep these from being trained."""
    for number in range(8):
        task = {"task": f"t{number}"}
        await episodes(engine, f"calm{number}", *named(f"c{number}", 2), **task)
        await episodes(engine, "flood", *named(f"f{number}", 2), **task)
    # Two groups are half the flood's; two are formed of what else waits of their tasks.
    assert firsts(await trained(engine, rule(PAIRS, most_of_key=0.25))) == "ccccccff"


async def test_successes_are_capped_too(engine: AsyncEngine) -> None:
    of = rule(least_reward=1.0)
    await episodes(engine, "k1", *named("f", 40))
    await episodes(engine, "k2", *named("c", 8))
    # As many that failed are taken along, within the same share.
    assert firsts(await trained(engine, of)).count("f") == 4


async def test_each_policy_has_its_own_share(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await ensure_base(connection, "n")
    await episodes(engine, "k1", *named("f", 20))
    await store(engine, *[call(name, api_key="k1", policy="n") for name in named("f", 20)])
    await episodes(engine, "k2", *named("c", 20))
    assert firsts(await trained(engine, SINGLE)) == "ccccffff"
    # The other policy serves one key alone.
    assert firsts(await trained(engine, rule(policy="n"))) == "f" * 8


async def test_an_episode_is_of_the_key_of_its_first_call(engine: AsyncEngine) -> None:
    late, early = call("e", api_key="late"), call("e", api_key="early")
    early, late = sorted([early, late], key=lambda one: one.id)
    early = msgspec.structs.replace(early, api_key="early")
    late = msgspec.structs.replace(late, api_key="late")
    query = text("SELECT e.api_key, p.api_key FROM episodes e, episode_policies p")
    for one in (late, early):
        await store(engine, one)
    async with engine.connect() as connection:
        assert [tuple(row) for row in await connection.execute(query)] == [("early", "early")]


async def test_whose_turn_it_is_does_not_depend_on_what_is_capped(engine: AsyncEngine) -> None:
    await episodes(engine, "k1", *named("f", 40))
    await episodes(engine, "k2", *named("c", 2))
    async with engine.connect() as connection:
        assert await waiting_updates(connection, rule(most_of_key=1.0)) == 42 / 8
        assert await waiting_updates(connection, SINGLE) == 6 / 8
        assert await waiting_updates(connection, rule(most_of_task=0.125)) == 6 / 8
        assert await waiting_updates(connection, rule(PAIRS, needs_spread=True)) == 0
        assert await capped(connection, SINGLE, 0) == {"key": 36}
        assert await capped(connection, rule(most_of_key=1.0), 0) == {}


async def test_the_trainer_says_how_many_wait_because_of_a_cap(engine: AsyncEngine) -> None:
    recipe = parse_recipe(
        "[claim]\ngroup_size = 1\ngroups = 8\nmost_of_key = 0.5\n[credit]\nbaseline = 'none'", "r"
    )
    await episodes(engine, "k1", *named("f", 40))
    labels = {"policy": "m", "source": "key"}

    async def told() -> float | None:
        await Expiring(engine, claim_rule(recipe, "m"), {}).expire(0)
        return REGISTRY.get_sample_value("pawl_capped_episodes", labels)

    assert await told() == 0
    await episodes(engine, "k2", "c")
    assert await told() == 36


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("group_size", [1, 2])
async def test_any_ledger_is_trained_whole_once_and_within_shares(
    engine: AsyncEngine, seed: int, group_size: int
) -> None:
    dice = Random(seed)
    of = rule(
        PAIRS if group_size == 2 else SINGLE,
        max_age_s=NOW,
        smallest_group=1,
        most_of_key=dice.choice([0.25, 0.5, 0.8]),
        most_of_task=dice.choice([0.25, 0.5, 1.0]),
    )
    records: list[SpoolRecord] = []
    owners: dict[str, str] = {}
    for number in range(40):
        name, key = f"e{number}", dice.choice(["k1", "k1", "k1", "k2", "k3"])
        owners[name] = key
        records.append(call(name, api_key=key, task=f"t{dice.randrange(9)}"))
        records.append(reward(float(dice.randrange(2)), episode=name, at=dice.randrange(200)))
    await store(engine, *records)
    spent: list[str] = []
    while (claim := await trained(engine, of)) is not None:
        taken = held(claim)
        step = min(1.0, len(claim.groups) / of.groups)
        for count in Counter(owners[name] for name in taken).values():
            share = count / len(taken) * step
            assert count <= group_size or share <= of.most_of_key + 1e-9
        spent += taken
    assert sorted(spent) == sorted(owners)
