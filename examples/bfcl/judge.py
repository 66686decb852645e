"""Score the calls of a run by the leaderboard's own checkers: 1 if they are right, else 0."""

from __future__ import annotations

import json
from typing import Any

from leaderboard import SEVERAL_TURNS, is_right, went_right


def verdict(told: dict[str, Any]) -> dict[str, float]:
    """Return the reward of one run: `told` has the task, with its answer, and the output.

    `well_formed` says whether the server could read the calls, if a task of one turn needs some.
    """
    task, made = told["task"], json.loads(told["output"])
    if task["category"] in SEVERAL_TURNS:
        return {"reward": float(went_right(task, made["turns"], f"judged_{told['episode']}"))}
    reward = {"reward": float(is_right(task, made["calls"]))}
    if "irrelevance" in task["category"]:
        return reward
    return {**reward, "well_formed": float(made["well_formed"])}
