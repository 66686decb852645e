"""Run by launched.py, in two processes: one update by as many as there are.

Arguments: MODEL FOLDER LEARNER
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.support.training import ppo_recipe, recipe, rows, sft_recipe
from trainer.learners.distributed import Leader, follow
from trainer.learners.learner import Learner


def main(arguments: Sequence[str]) -> None:
    model, folder = arguments[0], Path(arguments[1])
    recipes = {"ppo": ppo_recipe, "sft": sft_recipe}
    chosen = recipes.get(arguments[2], recipe)(steps=2)
    learner = Learner(model, chosen, seed=0, scratch=folder / "scratch")
    if learner.processes.rank > 0:
        follow({"m": learner})
        return
    leader = Leader({"m": learner})
    leading = leader.learners["m"]
    leading.update(rows(0))
    first = folder / "1"
    first.mkdir()
    leading.save(first)
    leading.mark_saved(first)
    leading.update(rows(1))
    leading.restore(first)
    computed = {version: leading.version_logprobs(version, rows(1)) for version in (None, first)}
    leading.restore(first)
    leading.update(rows(1))
    (folder / "computed.json").write_text(json.dumps(list(computed.values())))
    second = folder / "2"
    second.mkdir()
    leading.save(second)
    leader.stop_followers()
