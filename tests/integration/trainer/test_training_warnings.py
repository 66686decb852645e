"""Traffic that a recipe does not train is warned of: in the log, the metric and `policies show`."""

from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from pawl.commands.policies import versions_of, versions_table
from store.policy_table import parse_policies
from store.version_states import ensure_base
from tests.support.ledger.episodes import ingest
from tests.support.ledger.updates import claimed, record_update
from tests.support.records import call, reward
from trainer.recipes.recipe import Recipe, load_recipe
from trainer.updates.claiming import Claiming, claim_rule
from trainer.updates.plan import plan_update
from trainer.updates.training_warnings import TrainingWarning, training_warnings

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


async def warnings(engine: AsyncEngine, recipe: Recipe) -> dict[Any, str]:
    async with engine.connect() as connection:
        found = await training_warnings(connection, claim_rule(recipe, "m"))
    return {kind: str(problem) for kind, problem in found.items()}


async def test_tasks_that_come_once_are_warned_of_under_a_recipe_of_groups(
    engine: AsyncEngine,
) -> None:
    recipe = Recipe.model_validate(RECIPE)
    await store(engine, [("a", 1.0), ("b", 0.0), ("c", 0.0)])
    assert await warnings(engine, recipe) == {}
    await store(engine, [("d", 1.0)])
    found = await warnings(engine, recipe)
    assert list(found) == ["alone"]
    assert "4 of 4 episodes with a reward wait in vain for 2 of their task" in found["alone"]
    assert "recipe `single`" in found["alone"]
    single = Recipe.model_validate({"claim": {"group_size": 1}, "credit": {"baseline": "moving"}})
    assert await warnings(engine, single) == {}
    # Where tasks come again.
    await store(engine, [(task, 1.0) for task in "eeefffff"])
    assert await warnings(engine, recipe) == {}


async def test_three_updates_without_signal_are_warned_of(engine: AsyncEngine) -> None:
    recipe = Recipe.model_validate(RECIPE)
    for number in range(3):
        assert await warnings(engine, recipe) == {}
        await store(engine, [(f"{task}{number}", 1.0) for task in "aabb"])
        await update(engine, recipe, None)
    assert list(await warnings(engine, recipe)) == ["no_signal"]
    await store(engine, [("c", 1.0), ("c", 0.0)])
    await update(engine, recipe, 1)
    assert await warnings(engine, recipe) == {}


async def test_three_updates_that_could_train_nothing_are_not_without_signal(
    engine: AsyncEngine,
) -> None:
    recipe = Recipe.model_validate(RECIPE)
    for number in range(3):
        rewards = [(f"{task}{number}", reward) for task in "ab" for reward in (0.0, 1.0)]
        await store(engine, rewards, trainable=False, reason="greedy")
        await update(engine, recipe, None)
    assert list(await warnings(engine, recipe)) == ["untrained"]


@pytest.mark.parametrize(("untrainable", "warned"), [(1, []), (2, ["untrained"])])
async def test_more_than_a_fifth_spent_untrained_is_warned_of(
    engine: AsyncEngine, untrainable: int, warned: list[str]
) -> None:
    recipe = Recipe.model_validate(RECIPE | {"claim": {"group_size": 8, "groups": 1}})
    greedy = {"trainable": False, "reason": "greedy"}
    await store(engine, [("a", float(n % 2)) for n in range(8 - untrainable)])
    await store(engine, [("a", 1.0)] * untrainable, **greedy)
    await update(engine, recipe, 1)
    found = await warnings(engine, recipe)
    assert list(found) == warned
    if warned:
        assert "2 of the last 8 episodes" in found["untrained"]
        assert "`no_trainable_call`: docs/explanation/trainable.md" in found["untrained"]


async def test_a_warning_is_logged_as_it_begins_counted_and_shown(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("[claim]\ngroup_size = 2\ngroups = 2\nmax_age_s = 0.001")
    await store(engine, [(task, 1.0) for task in "abcd"])
    claiming = Claiming(engine, claim_rule(load_recipe(str(file)), "m"), {})
    with capture_logs() as logs:
        await claiming.expire(0)
        await claiming.expire(1)
    assert [(log["kind"], log["log_level"]) for log in logs] == [("alone", "warning")]
    shown = {
        kind: REGISTRY.get_sample_value("pawl_training_warning", {"policy": "m", "reason": kind})
        for kind in get_args(TrainingWarning)
    }
    assert shown == {"alone": 1.0, "untrained": 0.0, "no_signal": 0.0}
    lines = await versions_of(engine, "m", recipe=str(file))
    assert "use the recipe `single`" in str(versions_table(lines).caption)


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        ('name = "m"', "use the recipe `single`"),
        ('name = "m"\ntrained = false', "None"),
        ('name = "other"', "None"),
        ('name = "m"\nrecipe = "gone.toml"', "is not known: recipe gone.toml"),
    ],
    ids=["trained", "fixed", "not in the file", "no recipe"],
)
async def test_show_warns_of_policies_that_are_trained(
    engine: AsyncEngine, policy: str, shown: str
) -> None:
    await store(engine, [(f"t{number}", 1.0) for number in range(128)])
    async with engine.begin() as connection:
        await connection.execute(
            text("UPDATE episode_policies SET scored_at = scored_at - interval '1 day'")
        )
    policies = parse_policies(f'[[policy]]\nbase = "q"\n{policy}', "policies.toml")
    lines = await versions_of(engine, "m", policies, recipe="default")
    assert shown in str(versions_table(lines).caption)
