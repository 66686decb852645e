"""The learning rate over optimiser steps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainer.recipes.schedule import has_ended, rate_share
from trainer.recipes.training import OptimizerOptions


def shares(count: int, **rule: object) -> list[float]:
    part = OptimizerOptions.model_validate(rule)
    return [rate_share(part, taken) for taken in range(count)]


def test_without_a_schedule_the_rate_is_what_the_recipe_says() -> None:
    assert shares(5) == [1.0] * 5


def test_it_rises_in_equal_parts() -> None:
    assert shares(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_it_falls_along_a_line_to_zero() -> None:
    found = shares(8, warmup_steps=2, schedule="linear", total_steps=6)
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0], abs=1e-12)


def test_it_falls_along_a_cosine_to_zero() -> None:
    found = shares(5, schedule="cosine", total_steps=4)
    half = (1 + math.sqrt(0.5)) / 2
    assert found == pytest.approx([1.0, half, 0.5, 1 - half, 0.0], abs=1e-12)


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 20),
    st.integers(21, 60),
    st.integers(0, 100),
)
def test_it_is_a_share_and_ends_where_it_is_zero(
    schedule: str, warmup: int, total: int, taken: int
) -> None:
    rule = OptimizerOptions.model_validate(
        {"schedule": schedule, "warmup_steps": warmup, "total_steps": total}
    )
    share = rate_share(rule, taken)
    assert 0.0 <= share <= 1.0
    assert has_ended(rule, taken) == (schedule != "constant" and taken >= total)
    if taken >= warmup:
        assert rate_share(rule, taken + 1) <= share


def test_it_cannot_end_before_it_is_warm() -> None:
    with pytest.raises(ValidationError, match="warmup_steps must be smaller than total_steps"):
        OptimizerOptions(schedule="linear", warmup_steps=5, total_steps=5)
