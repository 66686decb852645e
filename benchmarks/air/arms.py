"""One arm: a policy at work and its learner, wave after wave."""

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from benchmarks.air.base import World
from benchmarks.air.records import as_groups
from benchmarks.air.sampler import Played, Sampler
from benchmarks.air.task import NOTE, new_task
from store.records import Group
from trainer.credit import assign_credit
from trainer.learners.learner import Learner
from trainer.recipe import Recipe
from trainer.recipe_parts import BatchPart, ClaimPart, CreditPart, LoraPart, OptimizerPart
from trainer.rows import Row, training_rows

GROUPS: Final = 2
GROUP_SIZE: Final = 8
WAVE: Final = GROUPS * GROUP_SIZE


@dataclass(frozen=True, slots=True)
class Arm:
    """`unbounded` is no recipe of ours: `air_lambda` times the plain sum of all tool scores
    is added to the reward, as if nobody had thought of heaps of easy calls.
    """

    name: str
    air_lambda: float
    unbounded: bool = False


@dataclass(frozen=True, slots=True)
class Wave:
    """What a wave of episodes was like, before it was trained on."""

    r_final: float
    calls: float
    notes: float
    # The share of the groups that were trained.
    signal: float


def run_arm(world: World, base: str, arm: Arm, waves: int, seed: int) -> list[Wave]:
    """Train from the base model for so many waves."""
    torch.set_num_threads(1)
    recipe = recipe_of(arm)
    draw = random.Random(seed)
    sampler = Sampler(base, seed)
    with tempfile.TemporaryDirectory(prefix="pawl-air-") as scratch:
        learner = Learner(base, recipe, seed, Path(scratch))
        version = Path(scratch) / "version"
        version.mkdir()
        found = []
        for number in range(waves):
            if number % EVERY == 0:
                found.append(look(world, sampler, number, seed))
            played = play_wave(world, sampler, number, draw)
            rows = credited_rows(played, arm, recipe.credit, number)
            if rows:
                learner.update(rows)
                learner.save(version)
                sampler.load(version)
    return found


def recipe_of(arm: Arm) -> Recipe:
    """The default recipe's credit; the rest is of a size that suits a tiny model."""
    return Recipe(
        dtype="float32",
        claim=ClaimPart(group_size=GROUP_SIZE, groups=GROUPS),
        credit=CreditPart(air_lambda=0.0 if arm.unbounded else arm.air_lambda),
        optimizer=OptimizerPart(learning_rate=3e-3),
        batch=BatchPart(micro_batch_tokens=512),
        lora=LoraPart(rank=8, alpha=16.0),
    )


def play_wave(world: World, sampler: Sampler, number: int, draw: random.Random) -> list[Played]:
    """Fresh tasks, each as often as a group has members."""
    tasks = [
        new_task(f"{number}-{group}", world.tools, world.turns, draw) for group in range(GROUPS)
    ]
    return sampler.play([task for task in tasks for _ in range(GROUP_SIZE)])


def credited_rows(
    played: Sequence[Played], arm: Arm, rule: CreditPart, version: int
) -> list[Row]:
    """What the trainer makes of a wave."""
    rewards = [episode.state.reward for episode in played]
    if arm.unbounded:
        rewards = [
            reward + arm.air_lambda * sum_of_scores(episode, rule)
            for reward, episode in zip(rewards, played, strict=True)
        ]
    return training_rows(credit_of(as_groups(played, rewards, version), rule))


def credit_of(groups: Sequence[Group], rule: CreditPart):
    return assign_credit(groups, rule, oldest_version=0)


def sum_of_scores(episode: Played, rule: CreditPart) -> float:
    """The counter-example: every tool event counts, however often and however cheap."""
    return sum(rule.air_scores[turn.outcome.status] for turn in episode.turns)


EVERY=2
def look(world,sampler,number,seed):
    d=random.Random(-1)
    played=sampler.play([new_task("",world.tools,world.turns,d) for _ in range(256)])
    return _wave(played,[])
def _wave(played: Sequence[Played], rows: Sequence[Row]) -> Wave:
    tools = [turn.outcome.tool for episode in played for turn in episode.turns]
    return Wave(
        r_final=sum(episode.state.reward for episode in played) / len(played),
        calls=len(tools) / len(played),
        notes=tools.count(NOTE) / len(played),
        signal=len({row.episode_id for row in rows}) / len(played),
    )
