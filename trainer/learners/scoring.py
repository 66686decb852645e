"""Compute log-probabilities of recorded tokens under the current policy, by one of four ways.

A way (`trainer.batches.Way`) says which tokens the model computes: each distinct one of the rows'
prefix tree, with attention along the tree; each chain, in one plain causal pass from which all rows
are read off that are prefixes of it, whatever the model's layers are; or each row. In these the LM
head is computed in chunks, and only where a sampled token follows. The last way, row by row through
the model's own forward pass and head, is the reference, and what is left where nothing else works.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import structlog
import torch
from torch import Tensor

from trainer.batches import PLAIN, Row, RowKey, Way, build_tree, chains_of, padded
from trainer.errors import LearnerError
from trainer.learners.kernels.head import Head, head_logprobs
from trainer.learners.kernels.tree_attention import NAME, attention_tree
from trainer.learners.replay.shaping import History, places_of, reshaped

log = structlog.get_logger()

# Trees are padded to a multiple of these sizes: on a GPU each new size is compiled anew.
SIZES = {"cpu": 1, "cuda": 256}


class Scored(NamedTuple):
    """Hold the scores of the sampled tokens of some rows, M = Σ S, row after row.

    Shapes: `logprobs` (M,) in nats, in float32 at least, of each row's own distribution, with
    gradient if the model has one; `entropies` (M,) of the distributions they were drawn from;
    `hidden` (M, H), the LM head's inputs (None unless requested).
    """

    logprobs: Tensor
    entropies: Tensor
    hidden: Tensor | None


def score_rows(
    model: Any, rows: Sequence[Row], *, way: Way = "tree", hidden: bool = False
) -> Scored:
    """Score the sampled tokens of `rows`.

    Raises:
        LearnerError: the way is `tree`, and the model was not prepared for it (`choose_way`).
    """
    if way == "whole":
        scored = _score_whole(model, rows)
        return scored if hidden else scored._replace(hidden=None)
    states, parents = states_of(model, rows, way)
    labels = [token for row in rows for token in row.sampled_ids]
    labels_there = torch.tensor(labels, device=states.device)
    places = places_of(rows, parents)
    logprobs, entropies = head_logprobs(states, Head.of(model), places, rows, labels_there)
    seen = states[torch.tensor(parents, device=states.device)] if hidden else None
    return Scored(logprobs, entropies, seen)


def plain_logprobs(model: Any, rows: Sequence[Row], *, way: Way) -> list[list[float]]:
    """Return log-probabilities (S,) of each row's sampled tokens at temperature one, unshaped."""
    alone = ([msgspec.structs.replace(row, distribution=PLAIN)] for row in rows)
    with torch.no_grad():
        return [score_rows(model, row, way=way).logprobs.tolist() for row in alone]


def states_of(model: Any, rows: Sequence[Row], way: Way) -> tuple[Tensor, list[int]]:
    """Return the LM head's inputs at all tokens that are computed, (N, H).

    Beside them is the place of the token before every sampled one, row after row, (M,).
    """
    # One chain needs no tree: plain causal attention has the fastest kernels.
    is_tree = way == "tree" and len(chains_of(rows, way)) > 1
    states, paths = (_tree_states if is_tree else _chain_states)(model, rows, way)
    befores = [
        place
        for row, path in zip(rows, paths, strict=True)
        for place in path[len(row.prompt_ids) - 1 :]
    ]
    return states, befores


# The states of the computed tokens, and where those of each row's inputs are.
_States = tuple[Tensor, Sequence[Sequence[int]]]


def _tree_states(model: Any, rows: Sequence[Row], _: Way) -> _States:
    if model.config._attn_implementation != NAME:
        raise LearnerError("prefixes cannot be merged: the model's attention takes no tree")
    device = next(model.parameters()).device
    tree = padded(build_tree([row.inputs for row in rows]), SIZES[device.type])
    states = decoder_of(model.get_base_model())(
        input_ids=torch.tensor([tree.tokens], device=device),
        position_ids=torch.tensor([tree.depth], device=device),
        # Four dimensions, so that the model builds no mask of its own; attention uses the tree.
        attention_mask=torch.empty(1, 1, 1, 1, device=device),
        use_cache=False,
        tree=attention_tree(tree, device),
    )[0].squeeze(0)
    return states, tree.paths


def _chain_states(model: Any, rows: Sequence[Row], way: Way) -> _States:
    """Compute the longest row of each chain; equally long ones together, so that none is padded."""
    device = next(model.parameters()).device
    decoder = decoder_of(model.get_base_model())
    computed: list[Tensor] = []
    starts: dict[RowKey, int] = {}
    begin = 0
    for length, alike in groupby(chains_of(rows, way), lambda chain: chain[-1].size - 1):
        chains = list(alike)
        ids = torch.tensor([chain[-1].inputs for chain in chains], dtype=torch.long, device=device)
        computed.append(decoder(input_ids=ids, use_cache=False)[0].flatten(0, 1))
        for chain in chains:
            starts |= dict.fromkeys((row.key for row in chain), begin)
            begin += length
    paths = [range(starts[row.key], starts[row.key] + row.size - 1) for row in rows]
    return torch.cat(computed), paths


def decoder_of(base: Any) -> Any:
    """Return the part of a causal LM that turns token ids into the LM head's inputs."""
    decoder = base.get_decoder()
    # Of some models that read images this is a causal LM again.
    return decoder if decoder.get_output_embeddings() is None else decoder.model


def layers_of(base: Any) -> list[Any]:
    """Return the decoder's layers, in order; architectures call the list differently."""
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
    seen: list[Tensor] = []
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        logits = whole_logits(model, rows)
    finally:
        hook.remove()
    return [
        _scored(row, own[-len(row.sampled_ids) :], states[-len(row.sampled_ids) :])
        for row, own, states in zip(rows, logits, seen[0], strict=True)
    ]


def whole_logits(model: Any, rows: Sequence[Row]) -> Tensor:
    """Return the model's own logits for rows of equal length, (B, T, V).

    The last S of them are those before a row's sampled tokens.
    """
    device = next(model.parameters()).device
    first = min(len(row.prompt_ids) for row in rows) - 1
    logits: Tensor = model(
        input_ids=torch.tensor([row.inputs for row in rows], dtype=torch.long, device=device),
        logits_to_keep=torch.arange(first, rows[0].size - 1, device=device),
        use_cache=False,
    ).logits
    return logits


def _scored(row: Row, logits: Tensor, states: Tensor) -> Scored:
    """Score one row, from the logits (S, V) before each of its sampled tokens."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = torch.tensor(row.sampled_ids, dtype=torch.long, device=logits.device)
    if not row.distribution.is_plain:
        places = [(0, sampled) for sampled in range(len(row.sampled_ids))]
        history = History.of([row], places, logits.device)
        return Scored(*reshaped(wide, row.distribution, history, labels), states)
    distribution = torch.log_softmax(wide / row.distribution.temperature, dim=-1)
    with torch.no_grad():
        entropies = -torch.linalg.vecdot(distribution.exp(), distribution)
    return Scored(distribution.gather(1, labels[:, None])[:, 0], entropies, states)


def attend(model: Any, way: Way) -> None:
    """Let the base of `model` attend along trees, or as it does by itself."""
    base = model.get_base_model()
    wanted = NAME if way == "tree" else own_attention(base)
    if model.config._attn_implementation != wanted:
        base.set_attn_implementation(wanted)


def own_attention(base: Any) -> str:
    """Return the kind of attention that the architecture of `base` computes its own with.

    Some, as those with attention sinks, have none but their own code; torch's, which transformers
    takes all the same, caps no scores. Flex attention has sinks and caps, and keeps no scores, but
    has no backward pass on a CPU.
    """
    is_capped = getattr(base.config.get_text_config(), "attn_logit_softcapping", None)
    if base._supports_sdpa and not is_capped:
        return "sdpa"
    on_gpu = next(base.parameters()).device.type == "cuda"
    return "flex_attention" if on_gpu and base._supports_flex_attn else "eager"
