"""Compute the learning rate from the optimiser steps taken so far (pure)."""

from math import cos, pi

from trainer.recipes.training import OptimizerOptions


def rate_share(rule: OptimizerOptions, taken: int) -> float:
    """Return the factor (0 to 1) of the learning rate for the step after `taken` others.

    It rises linearly over `warmup_steps`, the last of which has the full rate, and then falls
    along `schedule`, reaching zero at step `total_steps` and staying there.
    """
    if taken < rule.warmup_steps:
        return (taken + 1) / rule.warmup_steps
    if rule.schedule == "constant":
        return 1.0
    if taken >= rule.total_steps:
        return 0.0
    progress = (taken - rule.warmup_steps) / (rule.total_steps - rule.warmup_steps)
    return 1.0 - progress if rule.schedule == "linear" else (1.0 + cos(pi * progress)) / 2.0


def has_ended(rule: OptimizerOptions, taken: int) -> bool:
    """Return True if a step after `taken` others would change nothing."""
    return rate_share(rule, taken) == 0.0
