"""What a server says, compared with the trainer: a version's probe, and the test of the server."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.publishing.pacing import slots_named_in
from trainer.publishing.probe import (
    Compared,
    ProbeRow,
    compare_served,
    rejection_reason,
    why_another_base,
    why_misfit,
)

TRAINED = [[-1.0, -2.0], [-3.0]]
BASE = [[-1.5, -2.5], [-3.5]]
ROWS = [
    ProbeRow(ids=(7, 8, 9), logprobs=tuple(trained), base_logprobs=tuple(base))
    for trained, base in zip(TRAINED, BASE, strict=True)
]


def test_right_adapter_passes_the_probe() -> None:
    probe = compare_served(ROWS, TRAINED, BASE)
    assert (probe.mean_difference, probe.moved, probe.tokens) == (0.0, 0.5, 3)
    assert rejection_reason(probe, 0.01) is None
    assert why_another_base(probe, 0.01) is None


def test_probe_finds_another_model_served_under_the_new_name() -> None:
    assert rejection_reason(compare_served(ROWS, BASE, BASE), 0.01) is not None
    assert rejection_reason(compare_served(ROWS, TRAINED, TRAINED), 0.01) is not None


@pytest.mark.parametrize("base", [[[-4.0, -2.5], [-3.5]], [[math.nan, -2.5], [-3.5]]])
def test_probe_finds_another_base_model(base: list[list[float]]) -> None:
    why = why_another_base(compare_served(ROWS, TRAINED, base), 0.01)
    assert why is not None
    assert "PAWL_MODEL" in why


def test_base_model_is_not_compared_where_its_values_are_unknown() -> None:
    rows = [msgspec.structs.replace(row, base_logprobs=()) for row in ROWS]
    assert why_another_base(compare_served(rows, TRAINED, [[-9.0, -9.0], [-9.0]]), 0.01) is None


def test_probe_rejects_log_probabilities_that_are_nan() -> None:
    nan = [[float("nan"), -2.0], [-3.0]]
    assert rejection_reason(compare_served(ROWS, nan, BASE), 0.01) is not None


FITS = Compared(
    served_base=(-1.0, -2.0),
    own_base=(-1.01, -2.0),
    served_adapter=(-1.8, -2.9),
    own_adapter=(-1.8, -2.91),
    served_sampled=(-3.0, -4.0),
    own_sampled=(-3.01, -4.0),
    own_raw=(-5.0, -7.0),
)
CASES = {
    "another base": ({"served_base": (-4.0, -2.0)}, "PAWL_MODEL"),
    "a base that computes no number": ({"served_base": (math.nan, -2.0)}, "PAWL_MODEL"),
    "an adapter that is not applied": ({"served_adapter": (-1.0, -2.0)}, "does not apply"),
    "half an adapter": ({"served_adapter": (-1.7, -2.7)}, "differently from the trainer"),
    "raw log-probabilities": ({"served_sampled": (-5.0, -7.0)}, "as they were before temperature"),
    "some others": ({"served_sampled": (-9.0, -7.0)}, "options that change what is sampled"),
}


def test_matching_log_probabilities_pass_the_self_test() -> None:
    assert why_misfit(FITS, 0.05) is None


@pytest.mark.parametrize("case", CASES)
def test_self_test_names_a_mismatch_with_its_remedy(case: str) -> None:
    changes, said = CASES[case]
    why = why_misfit(msgspec.structs.replace(FITS, **changes), 0.05)
    assert why is not None
    assert said in why


@given(
    st.lists(st.floats(-0.4, 0.4), min_size=2, max_size=2),
    st.lists(st.floats(-0.4, 0.4), min_size=2, max_size=2),
    st.floats(0.01, 1.0),
)
def test_larger_tolerance_of_the_self_test_never_refuses_more(
    base: list[float], adapter: list[float], tolerance: float
) -> None:
    compared = msgspec.structs.replace(
        FITS,
        served_base=tuple(map(sum, zip(FITS.own_base, base, strict=True))),
        served_adapter=tuple(map(sum, zip(FITS.own_adapter, adapter, strict=True))),
    )
    if why_misfit(compared, tolerance) is None:
        assert why_misfit(compared, 2 * tolerance) is None


@pytest.mark.parametrize("tolerance", [0.01, 0.3, 1.0, 20.0])
@pytest.mark.parametrize("arrives", [0.0, 0.5, 0.8, 2.0])
def test_adapter_that_is_ignored_or_applied_by_half_is_refused_at_every_tolerance(
    tolerance: float, arrives: float
) -> None:
    served = tuple(
        base + arrives * (own - base)
        for base, own in zip(FITS.own_base, FITS.own_adapter, strict=True)
    )
    compared = msgspec.structs.replace(FITS, served_base=FITS.own_base, served_adapter=served)
    why = why_misfit(compared, tolerance)
    assert why is not None
    assert f"{arrives:.0%} of its effect arrives" in why


METRICS = (
    "# HELP vllm:lora_requests_info Running stats on lora requests.\n"
    "# TYPE vllm:lora_requests_info gauge\n"
    'vllm:lora_requests_info{max_lora="4",running_lora_adapters="m@1",waiting_lora_adapters=""}'
    " 1.7e+09\n"
)


def test_adapter_slots_are_read_from_vllms_lora_requests_metric() -> None:
    assert slots_named_in(METRICS) == 4
    assert slots_named_in('vllm:lora_requests_info{a="",max_lora="12",b=""} 1.0') == 12


def test_adapter_slots_are_unknown_before_vllms_first_request() -> None:
    assert slots_named_in("") is None
    assert slots_named_in(METRICS.splitlines()[0]) is None
    assert slots_named_in('vllm:cache_config_info{max_lora="4"} 1.0\n') is None
