"""The CPU LoRA operations against a loop over rows, and how they are put in place."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pawl_cpu_lora import ops
from pawl_cpu_lora.ops import SMALL_BATCH_ROWS, group_rows
from pawl_cpu_lora.patch import OF_EXPERTS, REPLACEMENTS, UnsupportedVLLMError, replace_operations

SLOTS, RANK, WIDTH, OUT, OFFSET = 3, 4, 11, 6, 2
COLUMNS = OFFSET + OUT + 3
DTYPES = (torch.float32, torch.bfloat16)

BATCHES = {
    "empty": [],
    "no adapter": [-1] * 5,
    "one adapter": [1] * 5,
    "one row": [2],
    "one row without": [-1],
    "one adapter and the base": [0, -1, 0, 0, -1, -1, 0],
    "adapters side by side": [0, 0, 2, 2, 2, 1],
    "adapters mixed": [2, 0, 1, 0, 2, 2, 1],
    "adapters and the base mixed": [2, -1, 0, 2, -1, 1, 0, -1],
    "large and mixed": [(7 * i) % (SLOTS + 1) - 1 for i in range(3 * SMALL_BATCH_ROWS)],
}
batches = pytest.mark.parametrize("slots", BATCHES.values(), ids=BATCHES.keys())


@dataclass(frozen=True)
class Case:
    """Tensors of one batch; `output` starts with random content, negative zeros among it."""

    slots: list[int]
    inputs: torch.Tensor
    weights: torch.Tensor
    output: torch.Tensor

    @property
    def indices(self) -> torch.Tensor:
        return torch.tensor(self.slots, dtype=torch.int64)


def shrink_case(slots: list[int], dtype: torch.dtype) -> Case:
    """As vLLM shrinks: model dtype in, a float32 buffer out."""
    return _case(slots, dtype, dtype, torch.float32, out=RANK, width=WIDTH)


def expand_case(slots: list[int], dtype: torch.dtype) -> Case:
    """As vLLM expands: a float32 buffer in, model dtype out."""
    return _case(slots, torch.float32, dtype, dtype, out=OUT, width=RANK)


def _case(
    slots: list[int],
    inputs: torch.dtype,
    weights: torch.dtype,
    output: torch.dtype,
    *,
    out: int,
    width: int,
) -> Case:
    random = torch.Generator().manual_seed(len(slots))
    old = torch.randn(len(slots), COLUMNS, generator=random)
    old[:, ::2] = -0.0
    return Case(
        slots,
        torch.randn(len(slots), width, generator=random).to(inputs),
        torch.randn(SLOTS, 1, out, width, generator=random).to(weights),
        old.to(output),
    )


def expected(
    case: Case, *, offset: int = 0, keep: float = False, scaling: float = 1.0
) -> torch.Tensor:
    """One row at a time, in float64 from the values as they are stored."""
    output = case.output.double()
    for row, slot in enumerate(case.slots):
        if slot < 0:
            continue
        delta = scaling * (case.weights[slot, 0].double() @ case.inputs[row].double())
        columns = slice(offset, min(offset + len(delta), output.shape[1]))
        old = output[row, columns] if keep else 0.0
        output[row, columns] = old + delta[: columns.stop - columns.start]
    return output


def assert_result(case: Case, before: torch.Tensor, wanted: torch.Tensor) -> None:
    """Close to the loop where an adapter is, the same bits where none is."""
    tolerance = 5e-2 if torch.bfloat16 in (case.output.dtype, case.weights.dtype) else 1e-5
    torch.testing.assert_close(case.output.double(), wanted, rtol=tolerance, atol=tolerance)
    untouched = case.indices < 0
    assert torch.equal(_bits(case.output[untouched]), _bits(before[untouched]))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Equal floats may differ in bits: -0.0 == 0.0, and a NaN is unlike itself."""
    return tensor.contiguous().view(torch.uint8)


def run_arguments(
    slots: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """What vLLM's `prefill_metadata` holds: starts, lengths, slots and three sizes."""
    indices = torch.tensor(slots, dtype=torch.int64)
    run_slots, lengths = torch.unique_consecutive(indices, return_counts=True)
    starts = torch.cumsum(lengths, 0) - lengths
    longest = max(lengths.tolist(), default=0)
    return starts, lengths, run_slots, len(run_slots), longest, len(slots)


def apply(name: str, case: Case, option: float, *, by_runs: bool) -> None:
    """Run an operation; `option` is the scaling where it shrinks, else whether it adds."""
    given = run_arguments(case.slots) if by_runs else (case.indices,)
    columns = (OFFSET, OUT) if name == "expand_slice" else ()
    operation = getattr(ops, f"{'sgmv' if by_runs else 'bgmv'}_{name}")
    operation(case.inputs, case.weights, case.output, *given, *columns, option)


# By operation: what its last parameter may be.
OPTIONS = {"shrink": (1.0, 0.25), "expand": (True, False), "expand_slice": (True, False)}
OPERATIONS = [(name, option) for name, options in OPTIONS.items() for option in options]


def check_operation(name: str, option: float, slots: list[int], dtype: torch.dtype) -> None:
    """By rows and by runs the same bits, as the loop has them, and none outside of its columns."""
    shrinks = name == "shrink"
    make = shrink_case if shrinks else expand_case
    by_rows, by_runs = make(slots, dtype), make(slots, dtype)
    offset = OFFSET if name == "expand_slice" else 0
    before = by_rows.output.clone()
    wanted = expected(by_rows, offset=offset, **{"scaling" if shrinks else "keep": option})
    apply(name, by_rows, option, by_runs=False)
    apply(name, by_runs, option, by_runs=True)
    assert_result(by_rows, before, wanted)
    assert torch.equal(_bits(by_rows.output), _bits(by_runs.output))
    outside = torch.ones(COLUMNS, dtype=torch.bool)
    outside[offset : offset + (RANK if shrinks else OUT)] = False
    assert torch.equal(_bits(by_rows.output[:, outside]), _bits(before[:, outside]))


@batches
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "option"), OPERATIONS)
def test_cpu_lora_operation_matches_a_plain_loop(
    name: str, option: float, slots: list[int], dtype: torch.dtype
) -> None:
    check_operation(name, option, slots, dtype)


@given(
    slots=st.lists(st.integers(-1, SLOTS - 1), max_size=2 * SMALL_BATCH_ROWS),
    dtype=st.sampled_from(DTYPES),
    operation=st.sampled_from(OPERATIONS),
)
def test_cpu_lora_operation_matches_a_plain_loop_for_any_batch(
    slots: list[int], dtype: torch.dtype, operation: tuple[str, float]
) -> None:
    check_operation(*operation, slots, dtype)


def test_expand_stops_at_the_narrower_of_adapter_and_model() -> None:
    case = expand_case([0, -1, 1, 0], torch.float32)
    narrow = Case(case.slots, case.inputs, case.weights, case.output[:, : OUT - 2].clone())
    before, wanted = narrow.output.clone(), expected(narrow, keep=True)
    ops.bgmv_expand(narrow.inputs, narrow.weights, narrow.output, narrow.indices)
    assert_result(narrow, before, wanted)


@batches
def test_content_of_other_adapter_slots_and_of_an_overwritten_output_never_leaks(
    slots: list[int],
) -> None:
    """An unset slot may hold anything, and a fresh buffer too."""
    case = shrink_case(slots, torch.float32)
    used = sorted({slot for slot in slots if slot >= 0})
    idle = [slot for slot in range(SLOTS) if slot not in used]
    case.weights[idle] = float("nan")
    case.output[case.indices >= 0] = float("nan")
    ops.bgmv_shrink(case.inputs, case.weights, case.output, case.indices)
    assert not case.output[:, :RANK].isnan().any()


def test_weights_of_three_and_four_dimensions_give_the_same_output() -> None:
    first, second = (
        shrink_case([0, 2, -1, 0], torch.float32),
        shrink_case([0, 2, -1, 0], torch.float32),
    )
    ops.bgmv_shrink(first.inputs, first.weights, first.output, first.indices)
    ops.bgmv_shrink(second.inputs, second.weights.squeeze(1), second.output, second.indices)
    assert torch.equal(first.output, second.output)


def test_adapter_indices_rewritten_in_place_are_read_again() -> None:
    """vLLM keeps one index tensor and overwrites it at every step."""
    case, indices = shrink_case([0, 0, 0], torch.float32), torch.tensor([0, 0, 0])
    ops.bgmv_shrink(case.inputs, case.weights, case.output, indices)
    indices.copy_(torch.tensor([2, -1, 1]))
    after = Case([2, -1, 1], case.inputs, case.weights, case.output)
    before, wanted = case.output.clone(), expected(after)
    ops.bgmv_shrink(case.inputs, case.weights, case.output, indices)
    assert_result(after, before, wanted)


def test_a_batch_of_another_length_than_its_indices_is_refused() -> None:
    case = shrink_case([0, 1, 2], torch.float32)
    with pytest.raises(ValueError, match="2 adapter indices for 3 rows"):
        ops.bgmv_shrink(case.inputs, case.weights, case.output, torch.tensor([0, 1]))


def test_only_small_batches_that_interleave_adapters_use_all_slots_at_once() -> None:
    def at_once(slots: list[int]) -> bool:
        return group_rows(tuple(slots), (1,) * len(slots), SLOTS).spread is not None

    assert at_once([0, 1, 0, -1])
    assert not at_once([0, 0, 1, 1])
    assert not at_once([0, -1, 0])
    assert not at_once([0, 1] * SMALL_BATCH_ROWS)


def stock_module(name: str = "stock") -> ModuleType:
    """A module with functions of the names and parameters that vLLM 0.32 has."""
    module = ModuleType(name)
    for function, replacement in REPLACEMENTS.items():
        setattr(module, function, _same_parameters(replacement))
    return module


def _same_parameters(function: Callable[..., None]) -> Callable[..., None]:
    def stock(*args: object, **kwargs: object) -> None:
        raise AssertionError("a stock operation was called")

    stock.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return stock


def test_each_lora_operation_of_each_vllm_module_is_replaced_once() -> None:
    modules = [stock_module("one"), stock_module("two")]
    assert replace_operations(modules, "0.32.0")
    for module in modules:
        assert {name: getattr(module, name) for name in REPLACEMENTS} == REPLACEMENTS
    assert not replace_operations(modules, "0.32.0")


def test_missing_lora_operation_of_vllm_fails_before_any_operation_is_replaced() -> None:
    complete, lacking = stock_module("complete"), stock_module("lacking")
    stock = complete.bgmv_shrink
    del lacking.sgmv_expand
    with pytest.raises(
        UnsupportedVLLMError,
        match=r"supports vLLM 0\.32\.0, this is 9\.9: lacking has no sgmv_expand",
    ):
        replace_operations([complete, lacking], "9.9")
    assert complete.bgmv_shrink is stock


def test_changed_signature_of_a_vllm_lora_operation_is_refused() -> None:
    module = stock_module()
    module.bgmv_shrink = lambda inputs, weights: None  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedVLLMError, match=r"bgmv_shrink takes \(inputs, weights\)"):
        replace_operations([module], "9.9")


@pytest.mark.parametrize("replacements", OF_EXPERTS.values(), ids=OF_EXPERTS.keys())
def test_replacements_of_operations_on_experts_are_checked_alike(
    replacements: dict[str, Callable[..., object]],
) -> None:
    module = ModuleType("stock")
    for name, replacement in replacements.items():
        setattr(module, name, _same_parameters(replacement))
    assert replace_operations([module], "0.32.0", replacements)
    assert {name: getattr(module, name) for name in replacements} == replacements
    with pytest.raises(UnsupportedVLLMError, match="lacking has no"):
        replace_operations([ModuleType("lacking")], "9.9", replacements)


def test_all_prompt_rows_of_a_request_go_to_its_adapter() -> None:
    """vLLM asks so for prompt log-probabilities: one index, as many rows as the prompt has."""
    torch.manual_seed(0)
    inputs, weights = torch.randn(5, 8), torch.randn(2, 1, 3, 8)
    got, wanted = torch.zeros(5, 3), torch.zeros(5, 3)
    ops.bgmv_shrink(inputs, weights, got, torch.tensor([1]))
    ops.bgmv_shrink(inputs, weights, wanted, torch.tensor([1] * 5))
    assert torch.equal(got, wanted)


def test_prompt_rows_stay_unchanged_in_a_batch_if_no_adapter_changes_the_lm_head() -> None:
    target = torch.randn(5, 3)
    before = target.clone()
    ops.bgmv_expand(torch.randn(5, 8), torch.zeros(2, 1, 3, 8), target, torch.tensor([1, 0, -1]))
    assert torch.equal(target, before)


def test_prompt_rows_are_refused_in_a_batch_if_an_adapter_changes_the_lm_head() -> None:
    with pytest.raises(ValueError, match="LM head"):
        ops.bgmv_expand(
            torch.randn(5, 8), torch.ones(2, 1, 3, 8), torch.zeros(5, 3), torch.tensor([1, 0])
        )
