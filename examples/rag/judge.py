"""Score an answer: F1 of the words in its `<answer>` against the right words; 0 without it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def verdict(run: dict[str, Any]) -> dict[str, float]:
    """Return the reward of one run: `run` has the task, with its answer, and the output."""
    tags = TAG.findall(run["output"])
    if not tags:
        return {"reward": 0.0, "well_formed": 0.0}
    return {"reward": f1(words(tags[-1]), words(run["task"]["answer"])), "well_formed": 1.0}


def f1(given: Counter[str], right: Counter[str]) -> float:
    """Return the harmonic mean of precision and recall of words."""
    common = (given & right).total()
    return 2 * common / (given.total() + right.total()) if common else 0.0


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))
