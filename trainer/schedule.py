"""The learning rate's schedule, a function of the optimiser steps taken before (pure)."""

from math import cos, pi

from trainer.recipe_parts import OptimizerPart


def rate_share(rule: OptimizerPart, taken: int) -> float:
    """The share of its full rate that the step after `taken` others has.

    It rises in equal parts over `warmup_steps`, the last of which has the full rate, and
    then falls along `schedule`, which reaches zero at step `total_steps` and stays there.
    """
    if taken < rule.warmup_steps:
        return (taken + 1) / rule.warmup_steps
    if rule.schedule == "constant":
        return 1.0
    if taken >= rule.total_steps:
        return 0.0
    gone = (taken - rule.warmup_steps) / (rule.total_steps - rule.warmup_steps)
    return 1.0 - gone if rule.schedule == "linear" else (1.0 + cos(pi * gone)) / 2.0


def has_ended(rule: OptimizerPart, taken: int) -> bool:
    """Whether a step after `taken` others would change nothing."""
    return rate_share(rule, taken) == 0.0
