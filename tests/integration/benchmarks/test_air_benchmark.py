"""`benchmarks.air` samples as it says: what it records is what the learner scores."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.air.arms import credited_rows, new_tasks, recipe_of
from benchmarks.air.base import write_base
from benchmarks.air.sampler import Sampler
from benchmarks.air.worlds import SPARSE, WITH
from trainer.learners.learner import Learner


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the benchmark has it: the model is too small to be shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_recorded_logprobs_are_the_learners_before_and_after_an_update(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", SPARSE, steps=60)
    recipe = recipe_of(SPARSE, WITH)
    sampler = Sampler(base, seed=1)
    learner = Learner(base, recipe, 1, tmp_path)
    tasks = [task for task in new_tasks(SPARSE, 4, random.Random(1)) for _ in range(4)]
    version = tmp_path / "version"
    version.mkdir()
    for _ in range(2):
        played = sampler.play(tasks)
        rows = credited_rows(played, WITH, recipe.credit)
        assert rows
        assert sum(row.weight for row in rows) == pytest.approx(1.0)
        for row, logprobs in zip(rows, learner.logprobs(rows), strict=True):
            assert row.sampled_logprobs == pytest.approx(logprobs, abs=1e-4)
        assert {len(episode.turns) for episode in played} <= set(range(1, SPARSE.turns + 1))
        learner.update(rows)
        learner.save(version)
        sampler.load(version)
