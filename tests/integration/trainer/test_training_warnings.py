"""Traffic that a recipe does not train is warned of: in the log, the metric and `policies show`."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from pawl.commands.policies import read_version_lines, versions_table
from store.policy_table import parse_policies
from store.version_states import ensure_base
from tests.support.ledger.episodes import ingest
from tests.support.ledger.updates import claimed, record_update
from tests.support.records import call, reward
from trainer.recipes.recipe import Recipe
from trainer.updates.claiming import Claiming, claim_rule
from trainer.updates.plan import plan_update
from trainer.updates.training_warnings import TrainingWarning, describe_collapse, training_warnings

RECIPE = {"claim": {"group_size": 2, "groups": 2, "max_age_s": 0.001}}


async def store(engine: AsyncEngine, rewards: list[tuple[str, float]], **changes: Any) -> None:
    """Store an episode for each task and reward."""
    async with engine.begin() as connection:
        records = []
        for number, (task, value) in enumerate(rewards):
            name = f"{task}-{number}-{changes.get('trainable')}"
            records += [call(name, task=task, **changes), reward(value, episode=name)]
        await ingest(connection, records)
        await ensure_base(connection, "m")


async def update(engine: AsyncEngine, recipe: Recipe, version: int | None) -> None:
    claim = await claimed(engine, claim_rule(recipe, "m"))
    assert claim is not None
    await record_update(engine, claim, plan_update(claim, recipe), version)


async def warnings(engine: AsyncEngine) -> dict[Any, str]:
    async with engine.connect() as connection:
        found = await training_warnings(connection, "m")
    return {kind: str(problem) for kind, problem in found.items()}


async def without_signal(engine: AsyncEngine, number: int) -> None:
    await store(engine, [(f"{task}{number}", 1.0) for task in "aabb"])
    await update(engine, Recipe.model_validate(RECIPE), None)


async def test_three_updates_without_signal_are_warned_of(engine: AsyncEngine) -> None:
    for number in range(3):
        assert await warnings(engine) == {}
        await without_signal(engine, number)
    assert list(await warnings(engine)) == ["no_signal"]
    await store(engine, [(task, value) for task in "cd" for value in (1.0, 0.0)])
    await update(engine, Recipe.model_validate(RECIPE), 1)
    assert await warnings(engine) == {}


async def test_three_untrainable_updates_do_not_count_as_without_signal(
    engine: AsyncEngine,
) -> None:
    recipe = Recipe.model_validate(RECIPE)
    for number in range(3):
        rewards = [(f"{task}{number}", reward) for task in "ab" for reward in (0.0, 1.0)]
        await store(engine, rewards, trainable=False, reason="greedy")
        await update(engine, recipe, None)
    assert list(await warnings(engine)) == ["untrained"]


@pytest.mark.parametrize(("untrainable", "warned"), [(1, []), (2, ["untrained"])])
async def test_more_than_a_fifth_of_episodes_spent_untrained_is_warned_of(
    engine: AsyncEngine, untrainable: int, warned: list[str]
) -> None:
    recipe = Recipe.model_validate(RECIPE | {"claim": {"group_size": 8, "groups": 1}})
    greedy = {"trainable": False, "reason": "greedy"}
    await store(engine, [("a", float(n % 2)) for n in range(8 - untrainable)])
    await store(engine, [("a", 1.0)] * untrainable, **greedy)
    await update(engine, recipe, 1)
    found = await warnings(engine)
    assert list(found) == warned
    if warned:
        assert "2 of the last 8 episodes" in found["untrained"]
        assert "`no_trainable_call`: docs/explanation/trainable.md" in found["untrained"]


@pytest.mark.parametrize(("share", "warned"), [(0.1, []), (0.3, ["untrained"])])
async def test_more_than_a_fifth_of_calls_without_loss_is_warned_of(
    engine: AsyncEngine, share: float, warned: list[str]
) -> None:
    recipe = Recipe.model_validate(RECIPE | {"claim": {"group_size": 8, "groups": 1}})
    await store(engine, [("a", float(n % 2)) for n in range(8)])
    await update(engine, recipe, 1)
    async with engine.begin() as connection:
        masked = "jsonb_build_object('masked_share', CAST(:share AS float8))"
        statement = text(f"UPDATE updates SET metrics = metrics || {masked}")
        await connection.execute(statement, {"share": share})
    found = await warnings(engine)
    assert list(found) == warned
    if warned:
        assert "as `masked`: serve in the trainer's precision" in found["untrained"]


def figures(*values: tuple[float, float], **families: tuple[float, ...]) -> list[Any]:
    """Updates with these entropies and mean rewards, given oldest first, the newest first."""
    return [
        SimpleNamespace(
            parent_version=version,
            claimed_at=NOON + timedelta(minutes=version),
            metrics={
                "entropy": entropy,
                "reward_mean": mean,
                "reward_std": 0.45,
                "families": {
                    name: {"reward": own[version], "episodes": 20} for name, own in families.items()
                },
            },
        )
        for version, (entropy, mean) in reversed(list(enumerate(values)))
    ]


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


WIDE = [(2.1, 0.3), (2.1, 0.35), (2.1, 0.4), (1.5, 0.5), (1.5, 0.5), (1.5, 0.5)]


def test_narrowed_answers_with_a_lower_reward_are_a_collapse() -> None:
    assert describe_collapse(figures(*WIDE, *[(0.3, 0.22)] * 3)) == (
        "worse than version 5: answers narrowed, entropy 2.1 → 0.3, reward 0.5 → 0.22",
        NOON + timedelta(minutes=6),
    )


def test_collapsing_family_is_named_beside_improving_families() -> None:
    updates = figures(
        *WIDE,
        *[(0.3, 0.5)] * 3,
        shipping=(*[0.24] * 6, *[0.0] * 3),
        account=(*[0.5] * 6, *[0.9] * 3),
    )
    found = describe_collapse(updates)
    assert found is not None
    assert found[0] == (
        "worse than version 5: answers narrowed, entropy 2.1 → 0.3, shipping 0.24 → 0"
    )


@pytest.mark.parametrize(
    "updates",
    [
        [],
        [(2.1, 0.5), (0.3, 0.2), (0.3, 0.2)],
        [*WIDE, *[(0.3, 0.6)] * 3],
        [*WIDE, *[(1.4, 0.2)] * 3],
        [*WIDE, (0.3, 0.2), (2.0, 0.5), (2.0, 0.5)],
    ],
    ids=["none", "too few", "learned", "as wide", "one update"],
)
def test_updates_without_lasting_narrowing_and_lower_reward_are_no_collapse(
    updates: list[tuple[float, float]],
) -> None:
    assert describe_collapse(figures(*updates)) is None


async def test_collapse_warning_names_the_roll_back_command(engine: AsyncEngine) -> None:
    recipe = Recipe.model_validate({"claim": {"group_size": 4, "groups": 1}})
    for number in range(6):
        rewards = (1.0, 1.0, 0.0, 1.0) if number < 3 else (0.0, 0.0, 0.0, 1.0)
        await store(engine, [(f"a{number}", value) for value in rewards])
        await update(engine, recipe, number + 1)
        async with engine.begin() as connection:
            entropy = "metrics || jsonb_build_object('entropy', CAST(:entropy AS float8))"
            await connection.execute(
                text(f"UPDATE updates SET metrics = {entropy} WHERE version = :version"),
                {"entropy": 2.0 if number < 3 else 0.2, "version": number + 1},
            )
    found = await warnings(engine)
    assert "entropy 2 → 0.2, reward 0.75 → 0.25, since 20" in found["collapsed"]
    assert ": `pawl policies rollback m` goes back" in found["collapsed"]


async def test_training_warning_is_logged_as_it_begins_counted_and_shown(
    engine: AsyncEngine,
) -> None:
    for number in range(3):
        await without_signal(engine, number)
    claiming = Claiming(engine, claim_rule(Recipe.model_validate(RECIPE), "m"), {})
    with capture_logs() as logs:
        await claiming.consume_expired(0)
        await claiming.consume_expired(1)
    assert [(log["kind"], log["log_level"]) for log in logs] == [("no_signal", "warning")]
    shown = {
        kind: REGISTRY.get_sample_value("pawl_training_warning", {"policy": "m", "reason": kind})
        for kind in get_args(TrainingWarning)
    }
    assert shown == {"untrained": 0.0, "no_signal": 1.0, "collapsed": 0.0}


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        ('name = "m"', "the last 3 updates had no signal"),
        ('name = "m"\ntrained = false', "None"),
        ('name = "other"', "None"),
    ],
    ids=["trained", "fixed", "not in the file"],
)
async def test_policies_show_warns_only_of_trained_policies(
    engine: AsyncEngine, policy: str, shown: str
) -> None:
    for number in range(3):
        await without_signal(engine, number)
    policies = parse_policies(f'[[policy]]\nbase = "q"\n{policy}', "policies.toml")
    lines = await read_version_lines(engine, "m", policies, "default")
    assert shown in str(versions_table(lines).caption)
