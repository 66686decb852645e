"""Score the calls of a run by the leaderboard's own checkers: 1 if they are right, else 0."""

from __future__ import annotations

import json
from typing import Any

from leaderboard import SEVERAL_TURNS, is_right, is_right_in_turns


def verdict(run: dict[str, Any]) -> dict[str, float]:
    """Return the reward of one run: `run` has the task, with its answer, and the output.

    `well_formed`, for tasks of one turn that need calls, is 1 if the server could read the calls.
    """
    task, made = run["task"], json.loads(run["output"])
    if task["category"] in SEVERAL_TURNS:
        return {"reward": float(is_right_in_turns(task, made["turns"], f"judged_{run['episode']}"))}
    reward = {"reward": float(is_right(task, made["calls"]))}
    if "irrelevance" in task["category"]:
        return reward
    return {**reward, "well_formed": float(made["well_formed"])}
