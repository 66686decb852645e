"""Run all arms of all seeds, in processes of one thread each."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Final

from benchmarks.air.arms import run_arm
from benchmarks.air.base import write_base
from benchmarks.air.figures import Curves
from benchmarks.air.worlds import ARMS, Arm, Look, World

# Optimiser steps of a base model.
BASE_STEPS: Final = 1000

Said = Callable[[str], None]


def run_worlds(
    worlds: Sequence[World],
    seeds: Sequence[int],
    base_steps: int,
    jobs: int,
    folder: Path,
    say: Said,
) -> dict[str, Curves]:
    """Return world → arm → seed → curve; the base models are written into `folder`."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare) as pool:
        writing = {
            world.name: pool.submit(write_base, folder / world.name, world, base_steps)
            for world in worlds
        }
        bases = {name: future.result() for name, future in writing.items()}
        say("the base models are made")
        running = {
            pool.submit(run_arm, world, bases[world.name], arm, seed): (world, arm, seed)
            for seed in seeds
            for world in worlds
            for arm in ARMS[world.name]
        }
        return _gathered(running, worlds, seeds, say)


def _prepare() -> None:
    """Make a worker compute in one thread and show no progress of its own."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()


def _gathered(
    running: dict[Future[list[Look]], tuple[World, Arm, int]],
    worlds: Sequence[World],
    seeds: Sequence[int],
    say: Said,
) -> dict[str, Curves]:
    found: dict[tuple[str, str, int], list[Look]] = {}
    for future in as_completed(running):
        world, arm, seed = running[future]
        curve = found[world.name, arm.name, seed] = future.result()
        end = curve[-1]
        say(
            f"{len(found)}/{len(running)} {world.name}, {arm.name}, seed {seed}: "
            f"{curve[0].r_final:.3f} → {end.r_final:.3f} in {end.episodes} episodes"
        )
    return {
        world.name: {
            arm.name: {seed: found[world.name, arm.name, seed] for seed in seeds}
            for arm in ARMS[world.name]
        }
        for world in worlds
    }
