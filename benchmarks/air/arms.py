"""Run one arm: a policy at work and its learner, wave after wave, and looks at it in between."""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from benchmarks.air.records import POLICY, as_groups
from benchmarks.air.sampler import Played, Sampler
from benchmarks.air.task import NOTE, Task, new_task
from benchmarks.air.worlds import Arm, Look, World
from store.records import Group
from trainer.batches.rows import Row, training_rows
from trainer.credit.assign import TransitionCredit, assign_credit
from trainer.learners.learner import Learner
from trainer.recipes.recipe import (
    BatchOptions,
    ClaimOptions,
    CreditOptions,
    LoraOptions,
    OptimizerOptions,
    Recipe,
)

GROUP_SIZE: Final = 8
# The policy is looked at before every second wave, on so many tasks that it never trains on.
LOOK_EVERY: Final = 2
HELD_OUT: Final = 256
HELD_OUT_SEED: Final = -1


def run_arm(world: World, base: str, arm: Arm, seed: int) -> list[Look]:
    """Train from the base model for the world's number of waves."""
    torch.set_num_threads(1)
    recipe = recipe_of(world, arm)
    draw = random.Random(seed)
    held_out = new_tasks(world, HELD_OUT, random.Random(HELD_OUT_SEED))
    sampler = Sampler(base, seed)
    looks, each = [], world.groups * GROUP_SIZE
    with tempfile.TemporaryDirectory(prefix="pawl-air-") as scratch:
        learner = Learner(base, recipe, seed, Path(scratch))
        for wave in range(world.waves):
            if wave % LOOK_EVERY == 0:
                looks.append(_look(wave * each, sampler.play(held_out)))
            tasks = new_tasks(world, world.groups, draw)
            played = sampler.play([task for task in tasks for _ in range(GROUP_SIZE)])
            _train(learner, sampler, credited_rows(played, arm, recipe.credit), Path(scratch))
        looks.append(_look(world.waves * each, sampler.play(held_out)))
    return looks


def _train(learner: Learner, sampler: Sampler, rows: Sequence[Row], scratch: Path) -> None:
    """Train one update, and sample with what came of it; do nothing where no group has a spread."""
    if not rows:
        return
    learner.update(rows)
    version = scratch / "version"
    version.mkdir(exist_ok=True)
    learner.save(version)
    sampler.load(version)


def recipe_of(world: World, arm: Arm) -> Recipe:
    """Return a recipe with the default's credit, and else of a size that suits a tiny model."""
    return Recipe(
        dtype="float32",
        claim=ClaimOptions(group_size=GROUP_SIZE, groups=world.groups),
        credit=CreditOptions(air_lambda=0.0 if arm.unbounded else arm.air_lambda),
        optimizer=OptimizerOptions(learning_rate=3e-3),
        batch=BatchOptions(micro_batch_tokens=512),
        lora=LoraOptions(rank=8, alpha=16.0),
    )


def new_tasks(world: World, count: int, draw: random.Random) -> list[Task]:
    """Make so many fresh tasks."""
    return [new_task(str(number), world.tools, world.turns, draw) for number in range(count)]


def credited_rows(played: Sequence[Played], arm: Arm, rule: CreditOptions) -> list[Row]:
    """Return what the trainer makes of a wave."""
    rewards = [episode.state.reward for episode in played]
    if arm.unbounded:
        rewards = [
            reward + arm.air_lambda * sum_of_scores(episode, rule)
            for reward, episode in zip(rewards, played, strict=True)
        ]
    return training_rows(_credit(as_groups(played, rewards), rule))


def _credit(groups: Sequence[Group], rule: CreditOptions) -> Sequence[TransitionCredit]:
    return assign_credit(groups, rule, policy=POLICY, oldest_version=0).transitions


def sum_of_scores(episode: Played, rule: CreditOptions) -> float:
    """Return the counter-example: every tool event counts, however often and however cheap."""
    return sum(rule.air_scores[turn.outcome.status] for turn in episode.turns)


def _look(episodes: int, played: Sequence[Played]) -> Look:
    tools = [turn.outcome.tool for episode in played for turn in episode.turns]
    return Look(
        episodes=episodes,
        r_final=sum(episode.state.reward for episode in played) / len(played),
        calls=len(tools) / len(played),
        notes=tools.count(NOTE) / len(played),
    )
