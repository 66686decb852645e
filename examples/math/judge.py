"""Score an answer: 1 if the last number in it is the right one, else 0."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def verdict(told: dict[str, Any]) -> dict[str, float]:
    """Return the reward of one run: `told` has the task, with its answer, and the output."""
    numbers = NUMBER.findall(told["output"])
    given = float(numbers[-1].replace(",", "")) if numbers else None
    return {"reward": float(given == told["task"]["answer"])}
