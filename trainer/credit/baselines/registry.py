"""Find baselines by the names that recipes give (pure)."""

from collections.abc import Mapping
from functools import cache

import trainer.credit.baselines
from trainer.credit.baselines.baseline import Baseline
from trainer.credit.registry import implementations


@cache
def baselines() -> Mapping[str, Baseline]:
    """Return all baselines by name."""
    return implementations(trainer.credit.baselines, "BASELINE")


def baseline_names() -> tuple[str, ...]:
    """Return the names of all baselines."""
    return tuple(baselines())
