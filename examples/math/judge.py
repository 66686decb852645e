"""Score an answer: 1 if the last number in it is the right one, else 0."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def verdict(run: dict[str, Any]) -> dict[str, float]:
    """Return the reward of one run: `run` has the task, with its answer, and the output."""
    numbers = NUMBER.findall(run["output"])
    given = float(numbers[-1].replace(",", "")) if numbers else None
    return {"reward": float(given == run["task"]["answer"])}
