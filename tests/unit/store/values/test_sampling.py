"""Temperatures as vLLM uses them, and log-probabilities that a sampled token can have."""

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.values.sampling import LEAST_TEMPERATURE, number_of, used_temperature
from store.values.tokens import are_logprobs, may_be_sampled, pack_logprobs
from tests.support.stored import transition
from trainer.batches import training_rows
from trainer.credit.assign import TransitionCredit


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        *((1, 1.0), (0.7, 0.7), ("0.7", 0.7), (" 0.7\n", 0.7), (True, 1.0), ("1e-1", 0.1)),
        *((0, 0.0), (-0.0, 0.0), ("0", 0.0), (False, 0.0), ("-0", 0.0)),
        *((1e-3, 0.01), (1e-6, 0.01), ("1e-6", 0.01), (5e-324, 0.01), (0.01, 0.01), (0.011, 0.011)),
        *((-1, None), (None, None), ("hot", None), ("", None), ([], None), ({}, None)),
        *((math.inf, None), (math.nan, None), ("inf", None), ("1_0", None), (10**400, None)),
    ],
)
def test_temperatures(asked: object, used: float | None) -> None:
    assert used_temperature(asked) == used


@given(st.one_of(st.text(), st.integers(), st.floats(), st.from_regex(r"[ +\-.0-9eE_]{0,8}")))
def test_anything_is_a_finite_number_or_none(value: object) -> None:
    found = number_of(value)
    assert found is None or math.isfinite(found)
    used = used_temperature(value)
    assert used is None or used == 0 or used >= LEAST_TEMPERATURE


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, -9999.0, 0.5, -1e30])
def test_no_sampled_token_has_it(value: float) -> None:
    assert not are_logprobs(pack_logprobs([-1.0, value, -2.0]))
    assert are_logprobs(pack_logprobs([-1.0, 0.0, -9998.0, 1e-7]))


@given(st.binary(max_size=64))
def test_any_bytes_are_log_probabilities_or_not(data: bytes) -> None:
    whole = data[: len(data) // 4 * 4]
    if are_logprobs(whole):
        assert all(-9999 < value <= 1e-3 for value in array("f", whole))


@pytest.mark.parametrize(("recorded", "used"), [(1e-3, 0.01), ("0.5", 0.5), (0.7, 0.7)])
def test_rows_are_scored_at_what_was_used(recorded: object, used: float) -> None:
    """An earlier Pawl recorded what was asked for."""
    call = transition(sampling={"temperature": recorded})
    credit = TransitionCredit(
        episode_id=call.episode_id,
        episode="e",
        call=call,
        position=0,
        r_final=1.0,
        r_air=0.0,
        r_total=1.0,
        advantage=1.0,
        weight=1.0,
        reason=None,
    )
    [row] = training_rows([credit])
    assert row.distribution.temperature == used


@given(st.lists(st.floats() | st.floats(-10001, -9998) | st.floats(-1, 1.5e-3), max_size=6))
def test_a_list_may_be_sampled_if_each_of_its_values_may(values: list[float]) -> None:
    each = all(-9999.0 < value <= 1e-3 for value in values)
    assert may_be_sampled(values) is each
