"""Compute vLLM's LoRA operations on the CPU, as grouped matrix multiplications.

Names, parameters and meaning are those of `vllm.lora.ops.torch_ops.lora_ops`
in vLLM 0.32, except for index -1: a row without an adapter is never written,
whereas the stock operations apply the adapter in the last slot to it
(https://github.com/vllm-project/vllm/pull/48421).

Shapes, in all of them:

- `inputs` (rows, in), any float dtype; `output_tensor` (rows, columns), written in place.
- weights (slots, 1, out, in) or (slots, out, in); an adapter lives in one slot.
- `lora_indices_tensor` int64, -1 for none: (rows,) in `bgmv_*`; (runs,) in `sgmv_*`, where
  `seq_len_tensor` (runs,) gives the length of each run of rows.

Arithmetic is in the dtype of `output_tensor`, like the stock operations'.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch

# Above this many rows one multiplication over all slots wastes more
# arithmetic than the loop over adapters costs in calls.
SMALL_BATCH_ROWS = 64

# Every layer of a forward pass asks for the same grouping; prefill and decode
# alternate, so a few are enough.
_CACHED_GROUPINGS = 32


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """A batch's rows that use one adapter: a slice if contiguous, else their int64 indices."""

    slot: int
    rows: slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class ResultPlaces:
    """Where to find each row's result among the products of all rows with all slots.

    All three are int64 of shape (active,). `rows` are the rows with an adapter; `by_row` and
    `by_slot` are the places of their results among (rows x slots) and (slots x rows) results.
    """

    rows: torch.Tensor
    by_row: torch.Tensor
    by_slot: torch.Tensor


@dataclass(frozen=True, slots=True)
class Grouping:
    """A batch's rows grouped by adapter.

    If `spread` is set, one multiplication covers all slots; if None, there is one for each group.
    """

    row_count: int
    groups: tuple[AdapterRows, ...]
    spread: ResultPlaces | None


@lru_cache(maxsize=_CACHED_GROUPINGS)
def group_rows(slots: tuple[int, ...], lengths: tuple[int, ...], slot_count: int) -> Grouping:
    """Group a batch's rows by adapter: `lengths[i]` rows use slot `slots[i]`; -1 is no adapter.

    The cache's key is the content of the batch, never the identity of a tensor:
    vLLM rewrites its index tensors in place from step to step.
    """
    row_slots = [s for s, n in zip(slots, lengths, strict=True) for _ in range(n)]
    by_slot: dict[int, list[int]] = {}
    for row, slot in enumerate(row_slots):
        if slot >= 0:
            by_slot.setdefault(slot, []).append(row)
    groups = tuple(
        AdapterRows(slot, _slice_if_contiguous(rows)) for slot, rows in sorted(by_slot.items())
    )
    spread = (
        _result_places(row_slots, slot_count) if _is_mixed_batch(row_slots, len(groups)) else None
    )
    return Grouping(len(row_slots), groups, spread)


def _slice_if_contiguous(rows: list[int]) -> slice | torch.Tensor:
    """Return the rows as a slice if contiguous, else as indices (slower: gather and scatter)."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, dtype=torch.int64)


def _is_mixed_batch(row_slots: list[int], group_count: int) -> bool:
    """Return whether a small batch has several adapters, and one's rows are not contiguous."""
    if group_count < 2 or len(row_slots) > SMALL_BATCH_ROWS:
        return False
    runs = sum(slot >= 0 for slot, _ in groupby(row_slots))
    return runs > group_count


def _result_places(row_slots: list[int], slot_count: int) -> ResultPlaces:
    numbered = torch.tensor(row_slots, dtype=torch.int64)
    rows = (numbered >= 0).nonzero().view(-1)
    slots = numbered[rows]
    return ResultPlaces(rows, rows * slot_count + slots, slots * len(row_slots) + rows)


def bgmv_shrink(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """Set `output[:, :out] = scaling * inputs @ weights[slot].T` for each row with a slot."""
    weights = _weights_by_slot(lora_b_weights)
    grouping = _grouping_of_rows(lora_indices_tensor, weights, inputs.shape[0])
    target = output_tensor[:, : weights.shape[1]]
    _multiply(grouping, inputs, weights, target, keep=False, scaling=scaling)


def bgmv_expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """Set `output[:, :out] (+)= inputs @ weights[slot].T`: add if `add_inputs`, else overwrite."""
    weights = _weights_by_slot(lora_b_weights)
    grouping = _grouping_of_rows(lora_indices_tensor, weights, inputs.shape[0])
    _expand_common(grouping, inputs, weights, output_tensor, add_inputs)


def bgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Run `bgmv_expand` on the columns from `slice_offset` on; `slice_size` must equal `out`."""
    weights = _weights_by_slot(lora_b_weights)
    grouping = _grouping_of_rows(lora_indices_tensor, weights, inputs.shape[0])
    target = output_tensor[:, slice_offset : slice_offset + slice_size]
    _multiply(grouping, inputs, weights, target, keep=add_inputs)


def sgmv_shrink(
    inputs: torch.Tensor,
    lora_a_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    scaling: float,
) -> None:
    """Run `bgmv_shrink` for a batch given as runs of rows."""
    del b_seq_start_loc, batches, max_seq_length, token_nums  # The lengths imply them.
    weights = _weights_by_slot(lora_a_weights)
    grouping = _grouping_of_runs(lora_indices_tensor, seq_len_tensor, weights)
    target = output_tensor[:, : weights.shape[1]]
    _multiply(grouping, inputs, weights, target, keep=False, scaling=scaling)


def sgmv_expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    add_inputs: bool = False,
) -> None:
    """Run `bgmv_expand` for a batch given as runs of rows."""
    del b_seq_start_loc, batches, max_seq_length, token_nums
    weights = _weights_by_slot(lora_b_weights)
    grouping = _grouping_of_runs(lora_indices_tensor, seq_len_tensor, weights)
    _expand_common(grouping, inputs, weights, output_tensor, add_inputs)


def sgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = False,
) -> None:
    """Run `bgmv_expand_slice` for a batch given as runs of rows."""
    del b_seq_start_loc, batches, max_seq_length, token_nums
    weights = _weights_by_slot(lora_b_weights)
    grouping = _grouping_of_runs(lora_indices_tensor, seq_len_tensor, weights)
    target = output_tensor[:, slice_offset : slice_offset + slice_size]
    _multiply(grouping, inputs, weights, target, keep=add_inputs)


def _weights_by_slot(weights: torch.Tensor) -> torch.Tensor:
    """Return weights as (slots, out, in), from either of vLLM's two shapes."""
    return weights.squeeze(1) if weights.dim() == 4 else weights


def _grouping_of_rows(indices: torch.Tensor, weights: torch.Tensor, rows: int) -> Grouping:
    slots: list[int] = indices.tolist()
    if len(slots) != rows:
        slots = _slots_of_a_prompt(slots, weights, rows)
    return group_rows(tuple(slots), (1,) * rows, weights.shape[0])


def _slots_of_a_prompt(slots: list[int], weights: torch.Tensor, rows: int) -> list[int]:
    """Return a slot for each row of one request's prompt; `slots` are those of all requests.

    vLLM calls the LM head like this for prompt log-probabilities, and does not say whose prompt it
    is. The only slot of a batch is used. If no adapter adapts the LM head (all weights are 0), each
    row gets -1. Otherwise the error ends the engine, as in the stock operations.

    Raises:
        ValueError: there are several requests, and an adapter adapts the LM head.
    """
    if len(slots) == 1:
        return slots * rows
    if not weights.any():
        return [-1] * rows
    raise ValueError(
        f"{len(slots)} adapter indices for {rows} rows: prompt log-probabilities of an adapter"
        " that adapts the LM head cannot be computed in a batch with other requests"
    )


def _grouping_of_runs(
    indices: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor
) -> Grouping:
    # On the CPU, tolist() does not synchronise; it costs under a microsecond.
    return group_rows(tuple(indices.tolist()), tuple(lengths.tolist()), weights.shape[0])


def _expand_common(
    grouping: Grouping,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    keep: bool,
) -> None:
    """Run `_multiply` on the columns that weights and output share: their padding may differ."""
    common = min(weights.shape[1], output.shape[1])
    _multiply(grouping, inputs, weights[:, :common], output[:, :common], keep=keep)


def _multiply(
    grouping: Grouping,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    target: torch.Tensor,
    *,
    keep: bool,
    scaling: float = 1.0,
) -> None:
    """Set `target = keep * target + scaling * inputs @ weights[slot].T` for rows with a slot."""
    if not grouping.row_count == inputs.shape[0] == target.shape[0]:
        raise ValueError(
            f"{grouping.row_count} adapter indices for {inputs.shape[0]} input rows"
            f" and {target.shape[0]} output rows"
        )
    inputs = inputs.to(target.dtype)
    if grouping.spread is not None:
        _multiply_all_slots(grouping.spread, inputs, weights, target, keep, scaling)
        return
    for group in grouping.groups:
        _multiply_group(group, inputs, weights, target, keep, scaling)


def _multiply_group(
    group: AdapterRows,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    target: torch.Tensor,
    keep: bool,
    scaling: float,
) -> None:
    """Run `_multiply` on the rows of one adapter, in place if they are contiguous."""
    weight = weights[group.slot].to(target.dtype).t()
    if isinstance(group.rows, slice):
        # With beta=0 the old content is not read, even if it is NaN.
        target[group.rows].addmm_(inputs[group.rows], weight, beta=int(keep), alpha=scaling)
        return
    picked = inputs.index_select(0, group.rows)
    result = target.index_select(0, group.rows)
    result.addmm_(picked, weight, beta=int(keep), alpha=scaling)
    target.index_copy_(0, group.rows, result)


def _multiply_all_slots(
    spread: ResultPlaces,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    target: torch.Tensor,
    keep: bool,
    scaling: float,
) -> None:
    """Run `_multiply` on all rows with all slots at once, and pick each row's own result.

    Results are picked, not masked: the content of an idle slot must never enter a row's sum.
    """
    result = _results_of_active_rows(spread, inputs, weights.to(target.dtype))
    if scaling != 1.0:
        result.mul_(scaling)
    if keep:
        result.add_(target.index_select(0, spread.rows))
    target.index_copy_(0, spread.rows, result)


def _results_of_active_rows(
    spread: ResultPlaces, inputs: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the results (active, out) of the rows with an adapter.

    Shrinking has few columns a slot: one product of all slots beats a batch of small products.
    Expanding has many: a batch of one product a slot writes each picked row contiguously.
    """
    slots, out, width = weights.shape
    if out < width and weights.is_contiguous():
        products = torch.mm(inputs, weights.view(slots * out, width).t())
        return products.view(-1, out).index_select(0, spread.by_row)
    products = torch.bmm(inputs.expand(slots, -1, -1), weights.transpose(1, 2))
    return products.view(-1, out).index_select(0, spread.by_slot)
