"""Compute log-probabilities of recorded tokens under the current policy.

*Merged*: one packed forward pass over the prefix tree of the rows. A token attends to its
ancestors only, positions are depths in the tree, and the LM head sees only the nodes that a
sampled token follows. *Separate*: each row by itself, through the model's own forward pass.
This is the reference, and the way for models that cannot be merged: whether one can is told by its
configuration, and then tried.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import structlog
import torch
from torch import Tensor

from store.values.sampling import Distribution
from trainer.batches import Row, bare_row, build_tree, padded
from trainer.errors import LearnerError
from trainer.learners.kernels.head import head_logprobs
from trainer.learners.kernels.tree_attention import NAME, attention_tree
from trainer.learners.replay.shaping import History, places_of, reshaped

log = structlog.get_logger()

DEFAULT_ATTENTION: Final = "sdpa"
# Largest mean difference between merged and separate, in nats per token, by precision.
TOLERANCE: Final = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.2}
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
    model: Any, rows: Sequence[Row], *, hidden: bool = False, merge: bool = True
) -> Scored:
    """Score the sampled tokens of `rows`.

    Raises:
        LearnerError: `merge` is set and the model was not prepared for it (`why_separate`).
    """
    scored = _score_merged(model, rows) if merge else _score_separately(model, rows)
    return scored if hidden else scored._replace(hidden=None)


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
    parents = [
        node
        for row, path in zip(rows, tree.paths, strict=True)
        for node in path[len(row.prompt_ids) - 1 :]
    ]
    return states, parents


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


def why_separate(model: Any) -> str | None:
    """Prepare `model` (a PEFT model) for merged prefixes, or return why that is impossible.

    Merged log-probabilities are compared with separate ones on a few rows. If they differ, or
    the configuration rules merging out, the model keeps its own attention.
    """
    why = _unsupported_reason(model)
    if why is None:
        attend(model, merge=True)
        why = _mismatch_reason(model)
    if why is not None:
        attend(model, merge=False)
        log.warning("prefixes_not_merged", reason=why)
    return why


def attend(model: Any, *, merge: bool) -> None:
    """Let the base of `model` attend along trees, or as it does by itself."""
    wanted = NAME if merge else DEFAULT_ATTENTION
    if model.config._attn_implementation != wanted:
        model.get_base_model().set_attn_implementation(wanted)


def _unsupported_reason(model: Any) -> str | None:
    """Return why the configuration rules merging out, or None: a tree needs arbitrary masks.

    That is: attention without a window, no state that runs along the sequence, and scores that
    are neither capped nor dropped.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    against = {
        "its attention cannot be replaced": not model.get_base_model()._supports_attention_backend,
        f"it has layers of {', '.join(others)}": others,
        f"its attention has a window of {window} tokens": window,
        "its attention scores are capped": getattr(config, "attn_logit_softcapping", None),
        "its attention has dropout": getattr(config, "attention_dropout", 0.0),
        "its LM head is no plain matrix": type(head) is not torch.nn.Linear
        or head.bias is not None,
    }
    return next((why for why, holds in against.items() if holds), None)


@torch.no_grad()
def _mismatch_reason(model: Any) -> str | None:
    """Return how far merged and separate log-probabilities differ, or None if they agree."""
    model.eval()
    # Two rows that share a prompt, and one that shares half of it.
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (32,), generator=generator).tolist()
    rows = [
        bare_row(index, prompt, ids[14 + 6 * index : 20 + 6 * index])
        for index, prompt in enumerate([ids[:12], ids[:12], ids[:6]])
    ]
    merged = score_rows(model, rows).logprobs
    separate = score_rows(model, rows, merge=False).logprobs
    difference = float((merged - separate).abs().mean())
    if difference <= TOLERANCE[model.dtype]:
        return None
    return f"merged and separate differ by {difference:.2g} nats a token"
