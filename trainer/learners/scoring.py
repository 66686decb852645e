"""Compute log-probabilities of recorded tokens under the current policy, in one of four layouts.

The layouts are listed in `trainer.batches`. `tree` needs attention along the tree. `stretches` and
`chain` are plain causal passes: a stretch continues from the layers' states after its parent
stretch, and `chain` works with all kinds of layers. In these three, the LM head is computed in
chunks, and only where a sampled token follows. `whole` uses the model's own forward pass and head,
row by row; it is the reference and the last resort.
"""

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from inspect import signature
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgspec
import structlog
import torch
from torch import Tensor
from transformers import DynamicCache

from trainer.batches import (
    PLAIN_SOFTMAX,
    Layout,
    Row,
    RowKey,
    build_tree,
    chains_of,
    pad_tree,
    stretches_of,
)
from trainer.errors import LearnerError
from trainer.learners.kernels.head import Head, head_logprobs
from trainer.learners.kernels.tree_attention import TREE_ATTENTION, attention_tree
from trainer.learners.replay.shaping import History, places_of, score_for_autograd

log = structlog.get_logger()

# Trees are padded to a multiple of so many nodes: on a GPU each new size is compiled anew.
TREE_MULTIPLES = {"cpu": 1, "cuda": 256}
# transformers' names for the states of a layer: of attention, and, as dicts by the state's number,
# of convolutions and recurrences.
ATTENTION_STATES: Final = {"keys", "values", "cumulative_length", "is_initialized"}
CONVOLUTION_STATES: Final = {"conv_states", "has_previous_state", "is_conv_states_initialized"}
RECURRENCE_STATES: Final = {"recurrent_states", "is_recurrent_states_initialized"}


class Scored(NamedTuple):
    """Scores of the sampled tokens of some rows, M = Σ S, row after row.

    Shapes: `logprobs` (M,) in nats, in float32 at least, under each row's own distribution, with
    gradient if the model has one; `entropies` (M,) of these distributions; `hidden` (M, H), the LM
    head's inputs (None unless requested).
    """

    logprobs: Tensor
    entropies: Tensor
    hidden: Tensor | None


def score_rows(
    model: Any, rows: Sequence[Row], *, layout: Layout = "tree", hidden: bool = False
) -> Scored:
    """Score the sampled tokens of `rows`.

    Raises:
        LearnerError: the layout is `tree`, and the model was not prepared for it (`choose_layout`).
    """
    if layout == "whole":
        scored = _score_whole(model, rows)
        return scored if hidden else scored._replace(hidden=None)
    states, parents = states_of(model, rows, layout)
    labels = [token for row in rows for token in row.sampled_ids]
    label_tensor = torch.tensor(labels, device=states.device)
    places = places_of(rows, parents)
    logprobs, entropies = head_logprobs(states, Head.of_model(model), places, rows, label_tensor)
    head_inputs = states[torch.tensor(parents, device=states.device)] if hidden else None
    return Scored(logprobs, entropies, head_inputs)


def plain_logprobs(model: Any, rows: Sequence[Row], *, layout: Layout) -> list[list[float]]:
    """Return log-probabilities (S,) of each row's sampled tokens at temperature one, unshaped."""
    plain_rows = ([msgspec.structs.replace(row, distribution=PLAIN_SOFTMAX)] for row in rows)
    with torch.no_grad():
        return [score_rows(model, row, layout=layout).logprobs.tolist() for row in plain_rows]


def states_of(model: Any, rows: Sequence[Row], layout: Layout) -> tuple[Tensor, list[int]]:
    """Return the LM head's inputs at all computed tokens, (N, H), and indices into them.

    The indices, (M,), are those of the token before each sampled token, row after row.
    """
    # One chain needs no tree: plain causal attention has the fastest kernels.
    if layout == "tree" and len(chains_of(rows, layout)) == 1:
        layout = "chain"
    by_layout = {"tree": _tree_states, "stretches": _stretch_states, "chain": _chain_states}
    states, paths = by_layout[layout](model, rows)
    parents = [
        place
        for row, path in zip(rows, paths, strict=True)
        for place in path[len(row.prompt_ids) - 1 :]
    ]
    return states, parents


# The states of the computed tokens, and for each row the indices of its inputs' states.
_States = tuple[Tensor, Sequence[Sequence[int]]]


def _tree_states(model: Any, rows: Sequence[Row]) -> _States:
    if model.config._attn_implementation != TREE_ATTENTION:
        raise LearnerError(
            "the layout `tree` cannot be used: the model's attention takes no tree; call"
            " set_attention first"
        )
    device = next(model.parameters()).device
    tree = pad_tree(build_tree([row.inputs for row in rows]), TREE_MULTIPLES[device.type])
    states = decoder_of(model.get_base_model())(
        input_ids=torch.tensor([tree.tokens], device=device),
        position_ids=torch.tensor([tree.depth], device=device),
        # A dummy of four dimensions, so that the model builds no mask; attention uses the tree.
        attention_mask=torch.empty(1, 1, 1, 1, device=device),
        use_cache=False,
        tree=attention_tree(tree, device),
    )[0].squeeze(0)
    return states, tree.paths


def _chain_states(model: Any, rows: Sequence[Row]) -> _States:
    """Compute the longest row of each chain, those of equal length together, without padding."""
    device = next(model.parameters()).device
    decoder = decoder_of(model.get_base_model())
    computed: list[Tensor] = []
    starts: dict[RowKey, int] = {}
    begin = 0
    for length, alike in groupby(chains_of(rows, "chain"), lambda chain: chain[-1].size - 1):
        chains = list(alike)
        ids = torch.tensor([chain[-1].inputs for chain in chains], dtype=torch.long, device=device)
        computed.append(decoder(input_ids=ids, use_cache=False)[0].flatten(0, 1))
        for chain in chains:
            starts |= dict.fromkeys((row.key for row in chain), begin)
            begin += length
    paths = [range(starts[row.key], starts[row.key] + row.size - 1) for row in rows]
    return torch.cat(computed), paths


def _stretch_states(model: Any, rows: Sequence[Row]) -> _States:
    """Compute each shared stretch once, and rows without shared stretches as chains."""
    stretches, last = stretches_of(rows)
    unshared = {key for key, own in last.items() if stretches[own].parent is None}
    parts = [
        (_chain_states, [row for row in rows if row.key in unshared]),
        (_continued_states, [row for row in rows if row.key not in unshared]),
    ]
    computed: list[Tensor] = []
    paths: dict[RowKey, list[int]] = {}
    size = 0
    for compute, own in parts:
        if own:
            states, places = compute(model, own)
            for row, path in zip(own, places, strict=True):
                paths[row.key] = [size + place for place in path]
            computed.append(states)
            size += len(states)
    return torch.cat(computed), [paths[row.key] for row in rows]


def _continued_states(model: Any, rows: Sequence[Row]) -> _States:
    """Compute each stretch once, continuing from the layers' states after its parent."""
    device = next(model.parameters()).device
    decoder = decoder_of(model.get_base_model())
    # Models without attention take no positions, and call the states differently.
    parameters = signature(decoder.forward).parameters
    cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
    stretches, last = stretches_of(rows)
    computed: list[Tensor] = []
    states_after: list[LayerStates] = []
    paths: list[list[int]] = []
    size = 0
    for row, begin, end, parent in stretches:
        states = LayerStates(model.config, None if parent is None else states_after[parent])
        options: dict[str, Any] = {"use_cache": True, cache_name: states}
        if "position_ids" in parameters:
            options["position_ids"] = torch.arange(begin, end, device=device)[None]
        ids = torch.tensor([row.inputs[begin:end]], dtype=torch.long, device=device)
        computed.append(decoder(input_ids=ids, **options)[0].squeeze(0))
        states_after.append(states)
        path_before = [] if parent is None else paths[parent]
        paths.append([*path_before, *range(size, size + end - begin)])
        size += end - begin
    return torch.cat(computed), [paths[last[row.key]][: row.size - 1] for row in rows]


class LayerStates(DynamicCache):
    """The cache of a model's layers for one stretch: their states before it and after it.

    transformers' own cache is changed in place. Here `layers` keep the states before the stretch,
    and `after` gets the states after it. So several stretches can continue the same one, gradients
    pass through, and a layer may be computed a second time (gradient checkpointing).
    """

    def __init__(self, config: Any, before: "LayerStates | None") -> None:
        """Start from the states after the stretch `before`, or from none."""
        super().__init__(config=config)
        if before is not None:
            self.layers = before.after
        self.after: list[Any] = [copy(layer) for layer in self.layers]
        for layer in self.after:
            own = {k: dict(v) for k, v in vars(layer).items() if isinstance(v, dict)}
            vars(layer).update(own)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any) -> Any:
        """Add a layer's new keys and values; return all that its new tokens attend to."""
        return self._reset_layer(layer_idx, ATTENTION_STATES).update(key_states, value_states)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **how: Any
    ) -> Any:
        """Add a layer's new convolution inputs; return them with the earlier ones that it needs."""
        layer = self._reset_layer(layer_idx, CONVOLUTION_STATES, state_idx)
        return layer.update_conv_state(conv_states, state_idx, **how)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **how: Any
    ) -> Any:
        """Store and return the new state of a layer's recurrence."""
        layer = self._reset_layer(layer_idx, RECURRENCE_STATES, state_idx)
        return layer.update_recurrent_state(recurrent_states, state_idx, **how)

    def _reset_layer(self, index: int, names: set[str], state: int = 0) -> Any:
        """Return a layer of `after`, with the states in `names` as they were before the stretch."""
        before, after = vars(self.layers[index]), vars(self.after[index])
        for name in before.keys() & names:
            value = before[name]
            if not isinstance(value, dict):
                after[name] = value
            else:
                # Cloned, because the tensor is overwritten in place.
                old = value[state]
                after[name][state] = old.clone() if isinstance(old, Tensor) else old
        return self.after[index]


def decoder_of(base: Any) -> Any:
    """Return the part of a causal LM that turns token ids into the LM head's inputs."""
    decoder = base.get_decoder()
    # In some models that read images, this is a causal LM itself.
    return decoder if decoder.get_output_embeddings() is None else decoder.model


def layers_of(base: Any) -> list[Any]:
    """Return the decoder's layers in order, whatever their list is called; empty without one."""
    lists = (list(p) for p in decoder_of(base).children() if isinstance(p, torch.nn.ModuleList))
    return max(lists, key=len, default=[])


def _score_whole(model: Any, rows: Sequence[Row]) -> Scored:
    """Score rows of equal length together, so that the model sees no padding."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_length[row.size - 1].append(index)
    by_index: dict[int, Scored] = {}
    for indices in by_length.values():
        by_index |= zip(
            indices, _score_equal_lengths(model, [rows[i] for i in indices]), strict=True
        )
    in_order = [by_index[index] for index in range(len(rows))]
    logprobs, entropies, hidden = (torch.cat(some) for some in zip(*in_order, strict=True))
    return Scored(logprobs, entropies, hidden)


def _score_equal_lengths(model: Any, rows: Sequence[Row]) -> list[Scored]:
    head_inputs: list[Tensor] = []
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: head_inputs.append(inputs[0]))
    try:
        logits = whole_logits(model, rows)
    finally:
        hook.remove()
    return [
        _score_row(row, own[-len(row.sampled_ids) :], states[-len(row.sampled_ids) :])
        for row, own, states in zip(rows, logits, head_inputs[0], strict=True)
    ]


def whole_logits(model: Any, rows: Sequence[Row]) -> Tensor:
    """Return the model's own logits for rows of equal length, (B, T, V).

    Positions that predict no sampled token of any row are left out. A row's last S logits predict
    its sampled tokens.
    """
    device = next(model.parameters()).device
    first = min(len(row.prompt_ids) for row in rows) - 1
    logits: Tensor = model(
        input_ids=torch.tensor([row.inputs for row in rows], dtype=torch.long, device=device),
        logits_to_keep=torch.arange(first, rows[0].size - 1, device=device),
        use_cache=False,
    ).logits
    return logits


def _score_row(row: Row, logits: Tensor, states: Tensor) -> Scored:
    """Score one row from the logits (S, V) and the head's inputs before its sampled tokens."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = torch.tensor(row.sampled_ids, dtype=torch.long, device=logits.device)
    if not row.distribution.is_plain:
        places = [(0, sampled) for sampled in range(len(row.sampled_ids))]
        history = History.at_places([row], places, logits.device)
        return Scored(*score_for_autograd(wide, row.distribution, history, labels), states)
    distribution = torch.log_softmax(wide / row.distribution.temperature, dim=-1)
    with torch.no_grad():
        entropies = -torch.linalg.vecdot(distribution.exp(), distribution)
    return Scored(distribution.gather(1, labels[:, None])[:, 0], entropies, states)


def set_attention(model: Any, layout: Layout) -> None:
    """Switch `model` to tree attention for the layout `tree`, else to standard attention."""
    base = model.get_base_model()
    wanted = TREE_ATTENTION if layout == "tree" else attention_implementation(base)
    if model.config._attn_implementation != wanted:
        base.set_attn_implementation(wanted)


def attention_implementation(base: Any) -> str:
    """Return the name of the attention implementation that is correct for `base`.

    torch's SDPA has no attention sinks, and does not cap scores, though transformers selects it for
    models that need this. Flex attention has both, and keeps no scores, but has no backward pass on
    a CPU, where such models use their own code ("eager").
    """
    is_capped = getattr(base.config.get_text_config(), "attn_logit_softcapping", None)
    if base._supports_sdpa and not is_capped:
        return "sdpa"
    on_gpu = next(base.parameters()).device.type == "cuda"
    return "flex_attention" if on_gpu and base._supports_flex_attn else "eager"
