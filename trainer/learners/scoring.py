"""Compute log-probabilities of recorded tokens under the current policy.

*Merged*: one packed forward pass over the prefix tree of the rows. A token attends to its
ancestors only, positions are depths in the tree, and the LM head sees only the nodes that a
sampled token follows. *Separate*: each row by itself, through the model's own forward pass.
This is the reference, and the way for models that cannot be merged
(`trainer.learners.merging`).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from store.values.distribution import Distribution
from trainer.batches import Row, Tree, build_tree, padded
from trainer.errors import LearnerError
from trainer.learners.kernels.head import head_logprobs
from trainer.learners.kernels.tree_attention import NAME, attention_tree
from trainer.learners.replay.history import History
from trainer.learners.replay.places import places_of
from trainer.learners.replay.shaping import reshaped

# Trees are padded to a multiple of these sizes: on a GPU each new size is compiled anew.
SIZES = {"cpu": 1, "cuda": 256}


class Scored(NamedTuple):
    """Hold the scores of the sampled tokens of some rows, M = Σ S, row after row.

    Shapes: `logprobs` (M,) in nats, in float32 at least, of each row's own distribution, with
    gradient if the model has one; `entropies` (M,) of the distributions they were drawn from
    (zeros unless requested); `hidden` (M, H), the LM head's inputs (None unless requested).
    """

    logprobs: Tensor
    entropies: Tensor
    hidden: Tensor | None


def score_rows(
    model: Any,
    rows: Sequence[Row],
    *,
    entropy: bool = False,
    hidden: bool = False,
    merge: bool = True,
) -> Scored:
    """Score the sampled tokens of `rows`.

    Raises:
        LearnerError: `merge` is set and the model was not prepared for it (`why_separate`).
    """
    scored = _score_merged(model, rows) if merge else _score_separately(model, rows)
    return Scored(
        scored.logprobs,
        scored.entropies if entropy else torch.zeros_like(scored.entropies),
        scored.hidden if hidden else None,
    )


def parents_of(rows: Sequence[Row], tree: Tree) -> list[int]:
    """Return the node before every sampled token, row after row, in the tree of the `inputs`."""
    return [
        node
        for row, path in zip(rows, tree.paths, strict=True)
        for node in path[len(row.prompt_ids) - 1 :]
    ]


def plain_logprobs(model: Any, rows: Sequence[Row], *, merge: bool) -> list[list[float]]:
    """Return log-probabilities (S,) of each row's sampled tokens at temperature one, unshaped."""
    plain = Distribution(temperature=1.0)
    alone = ([msgspec.structs.replace(row, distribution=plain)] for row in rows)
    model.eval()
    with torch.no_grad():
        return [score_rows(model, row, merge=merge).logprobs.tolist() for row in alone]


def _score_merged(model: Any, rows: Sequence[Row]) -> Scored:
    if model.config._attn_implementation != NAME:
        raise LearnerError("prefixes cannot be merged: the model's attention takes no tree")
    states, parents = tree_states(model, rows)
    labels = [token for row in rows for token in row.sampled_ids]
    places = places_of(rows, parents)
    head = model.get_output_embeddings().weight
    labels_there = torch.tensor(labels, device=states.device)
    logprobs, entropies = head_logprobs(states, head, places, rows, labels_there)
    return Scored(logprobs, entropies, states[torch.tensor(parents, device=states.device)])


def tree_states(model: Any, rows: Sequence[Row]) -> tuple[Tensor, list[int]]:
    """Return the LM head's inputs at the nodes of the rows' prefix tree, (N, H).

    Beside them is the node before every sampled token, row after row, (M,).
    """
    device = next(model.parameters()).device
    tree = padded(build_tree([row.inputs for row in rows]), SIZES[device.type])
    states = (
        model.get_base_model()
        .get_decoder()(
            input_ids=torch.tensor([tree.tokens], device=device),
            position_ids=torch.tensor([tree.depth], device=device),
            # Four dimensions, so that the model builds no mask of its own; attention uses the tree.
            attention_mask=torch.empty(1, 1, 1, 1, device=device),
            use_cache=False,
            tree=attention_tree(tree, device),
        )[0]
        .squeeze(0)
    )
    return states, parents_of(rows, tree)


def _score_separately(model: Any, rows: Sequence[Row]) -> Scored:
    """Score rows of equal length together, so that the model sees no padding."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_length[len(row.inputs)].append(index)
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
        input_ids=torch.tensor([row.inputs for row in rows], device=device),
        logits_to_keep=torch.arange(first, len(rows[0].inputs), device=device),
        use_cache=False,
    ).logits
    return logits


def _scored(row: Row, logits: Tensor, states: Tensor) -> Scored:
    """Score one row, from the logits (S, V) before each of its sampled tokens."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = torch.tensor(row.sampled_ids, device=logits.device)
    if not row.distribution.is_plain:
        places = [(0, sampled) for sampled in range(len(row.sampled_ids))]
        history = History.of([row], places, logits.device)
        return Scored(*reshaped(wide, row.distribution, history, labels), states)
    distribution = torch.log_softmax(wide / row.distribution.temperature, dim=-1)
    with torch.no_grad():
        entropies = -torch.linalg.vecdot(distribution.exp(), distribution)
    return Scored(distribution.gather(1, labels[:, None])[:, 0], entropies, states)
