"""Rewards that are sums of metrics: the store makes them as credit does, in any order."""

import itertools
import random
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.link.claimable import count_missing_rewards, reward_rule, set_reward_rule
from store.read.episodes import read_episodes
from store.read.evaluations import rewards_by_version
from store.records import Episode, SpoolRecord
from store.selecting import select_episodes
from store.values.rewards import REWARD_ALONE, RewardRule, RewardTerm, reward_of
from tests.integration.store.test_groups import LONG_AGO
from tests.support.ledger.any_order import empty, same_in_any_order
from tests.support.ledger.episodes import keys, store
from tests.support.ledger.updates import claimed
from tests.support.records import call, statement
from trainer.recipes.recipe import Recipe
from trainer.updates.claiming import claim_rule
from trainer.updates.plan import plan_update

SUM = RewardRule(
    terms=(
        RewardTerm(metric="right", low=0.0, high=1.0),
        RewardTerm(metric="cost", weight=-0.5, low=0.0, high=4.0, default=1.0),
        RewardTerm(
            metric="verdict",
            weight=2.0,
            low=-1.0,
            high=1.0,
            default=0.0,
            texts={"good": 1.0, "bad": -1.0},
        ),
    )
)
OPTIONAL = RewardRule(
    terms=tuple(
        RewardTerm(metric=metric, low=0.0, high=1.0, default=0.0) for metric in ("right", "cost")
    )
)
VALUES: dict[str, tuple[float | str | None, ...]] = {
    "right": (0.0, 1.0, 0.5, -3.0, None, "right", "wrong"),
    "cost": (0.0, 2.0, 99.0, None),
    "verdict": ("good", "bad", "so so", 0.25, None),
    "reward": (0.0, 1.0, 1e300, None, "good"),
}
MADE = 12


async def rules(engine: AsyncEngine, **of: RewardRule) -> None:
    async with engine.begin() as connection:
        for policy, rule in of.items():
            await set_reward_rule(connection, policy, rule)


def some_records(dice: random.Random) -> list[SpoolRecord]:
    """Episodes of two policies and of one call or several, and what may be said of them."""
    calls = [call(f"e{n % MADE}", policy="mn"[n % 3 == 0], method="header") for n in range(30)]
    calls += [call(f"own{n}", policy="m", method="own") for n in range(3)]
    records: list[SpoolRecord] = [*calls]
    for _ in range(90):
        about, metric = dice.choice(calls), dice.choice(list(VALUES))
        value = dice.choice(VALUES[metric])
        # Many of one time: what counts of those must not be a matter of chance.
        target = {"episode": about.episode} if dice.random() < 0.6 else {"call": str(about.id)}
        source = dice.choice((None, None, "judge", "other"))
        records.append(statement(metric, value, at=dice.randrange(4), source=source, **target))
    return records


def made_by_credit(episode: Episode, rule: RewardRule) -> float | None:
    """The reward of an episode: what was said about all of it, else the mean of its calls'."""
    whole = reward_of(episode.feedback, rule).value
    own = [reward_of(one.feedback, rule).value for one in episode.calls]
    given = [one for one in own if one is not None]
    return whole if whole is not None or not given else sum(given) / len(given)


async def scores(engine: AsyncEngine) -> list[Any]:
    async with engine.connect() as connection:
        rows = await connection.execute(
            text(
                "SELECT e.key, p.policy, p.scored_at, p.call_scored_at, p.reward, p.lacks"
                " FROM episode_policies p JOIN episodes e ON e.id = p.episode_id ORDER BY 1, 2"
            )
        )
        return [tuple(row) for row in rows]


async def seen(engine: AsyncEngine) -> dict[str, Any]:
    async with engine.connect() as connection:
        episodes = await read_episodes(connection, await select_episodes(connection))
        worked = await rewards_by_version(connection, split="train")
    rows = await scores(engine)
    of = {episode.key: episode for episode in episodes}
    for key, policy, scored_at, call_scored_at, reward, lacks in rows:
        rule = SUM if policy == "m" else REWARD_ALONE
        own = reward_of(of[key].feedback, rule)
        assert reward == pytest.approx(own.value, abs=1e-12), (key, policy)
        assert (scored_at is None) == (own.value is None)
        paid = [reward_of(one.feedback, rule) for one in of[key].calls]
        assert (call_scored_at is None) == all(one.value is None for one in paid)
        if policy == "m" and own.value is None and call_scored_at is None:
            assert (lacks is not None) == any(one.lacks for one in (own, *paid))
    for one in worked:
        rule = SUM if one.policy == "m" else REWARD_ALONE
        having = {key for key, policy, *_ in rows if policy == one.policy}
        made = [made_by_credit(of[key], rule) for key in sorted(having)]
        given = [value for value in made if value is not None]
        assert (one.episodes, one.scored) == (len(made), len(given))
        assert one.mean == pytest.approx(sum(given) / len(given))
    # In which order they are added is a matter of chance: the last digit of a mean may be, too.
    work = [(one.policy, one.version, one.episodes, one.scored) for one in worked]
    return {"scores": rows, "work": work}


@pytest.mark.parametrize("seed", range(3))
async def test_store_sums_reward_metrics_as_credit_does_in_any_order_of_arrival(
    engine: AsyncEngine, seed: int
) -> None:
    await rules(engine, m=SUM)
    dice = random.Random(seed)
    found = await same_in_any_order(engine, some_records(dice), dice, seen)
    assert {row[4] for row in found["scores"]} > {None}


async def test_new_reward_rule_rescores_earlier_feedback(engine: AsyncEngine) -> None:
    records = some_records(random.Random(7))
    await store(engine, *records)
    alone = await scores(engine)
    await rules(engine, m=SUM)
    later = await scores(engine)
    assert later != alone
    await rules(engine, m=REWARD_ALONE)
    assert await scores(engine) == alone
    await empty(engine)
    await rules(engine, m=SUM)
    await store(engine, *records)
    assert await scores(engine) == later
    async with engine.connect() as connection:
        assert await reward_rule(connection, "m") == SUM
        assert await reward_rule(connection, "n") == REWARD_ALONE


async def test_episode_is_scored_for_a_policy_that_serves_a_call_after_the_reward_came(
    engine: AsyncEngine,
) -> None:
    await rules(engine, m=SUM)
    await store(engine, call("e", policy="n"), statement("right", 1.0, episode="e"))
    await store(engine, call("e", policy="m"))
    assert [(row[1], row[4]) for row in await scores(engine)] == [("m", 0.5), ("n", None)]


async def test_only_episodes_with_the_required_reward_metrics_are_claimed_and_others_counted(
    engine: AsyncEngine,
) -> None:
    recipe = Recipe.model_validate(
        {
            "reward": {
                "right": {"range": [0, 1], "values": {"yes": 1.0}},
                "cost": {"range": [0, 4], "weight": -0.5, "default": 0.0},
            },
            "claim": {"group_size": 1, "groups": 3},
            "credit": {"baseline": "none", "normalisation": "none"},
        }
    )
    await rules(engine, m=recipe.reward_rule)
    said: dict[str, list[tuple[str, float | str | None]]] = {
        "scored": [("right", 1.0)],
        "dear": [("right", "yes"), ("cost", 2.0)],
        "third": [("right", 0.0)],
        "rewarded": [("reward", 1.0)],
        "dear only": [("cost", 1.0)],
        "in other words": [("right", "perhaps")],
        "withdrawn": [("right", 1.0), ("right", None)],
        "silent": [],
    }
    await store(
        engine,
        *[call(key, task=f"t/{key}", started_at=LONG_AGO) for key in said],
        *[
            statement(metric, value, at=place, episode=key)
            for key, statements in said.items()
            for place, (metric, value) in enumerate(statements)
        ],
    )
    async with engine.connect() as connection:
        assert await count_missing_rewards(connection, "m") == {
            "missing_metric": 1,
            "undeclared_text": 1,
        }
    claim = await claimed(engine, claim_rule(recipe, "m"))
    assert claim is not None
    assert sorted(keys(claim)) == ["dear", "scored", "third"]
    found = {one.episode: one for one in plan_update(claim, recipe).credited}
    assert {key: one.r_final for key, one in found.items()} == {
        "scored": 1.0,
        "dear": 0.0,
        "third": 0.0,
    }
    assert found["dear"].parts == {"right": 1.0, "cost": -1.0}


async def test_repeated_feedback_keeps_the_time_of_its_first_request(engine: AsyncEngine) -> None:
    said = [
        statement("reward", 1.0, at=0, key="k", episode="e"),
        statement("reward", 0.25, at=5, episode="e"),
        statement("reward", 1.0, at=9, key="k", episode="e"),
    ]
    for order in itertools.permutations([*said, call("e")]):
        for one in order:
            await store(engine, one)
        assert [row[4] for row in await scores(engine)] == [0.25]
        await empty(engine)


async def test_any_metric_scores_an_episode_if_all_reward_metrics_have_defaults(
    engine: AsyncEngine,
) -> None:
    await rules(engine, m=OPTIONAL)
    await store(engine, call("a"), call("b"), statement("cost", 0.5, episode="a"))
    assert [(row[0], row[4]) for row in await scores(engine)] == [("a", 0.5), ("b", None)]
