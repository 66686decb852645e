"""Log-probabilities of recorded tokens under the present policy, each prefix computed once.

One packed forward over the prefix tree of a micro-batch: a token attends to its ancestors
only (a boolean mask for SDPA), positions are depths, and the LM head runs on the nodes that
a sampled token follows, in float32.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.rows import Row
from trainer.trees import Tree, build_tree


class Scored(NamedTuple):
    """All sampled tokens of some rows, M = Σ S, row after row.

    Shapes: `logprobs` (M,) float32 at each row's own temperature, with gradient where the
    model has it; `entropies` (M,) of the distributions they were drawn from (zeros unless
    asked for); `hidden` (M, H), what the LM head saw (None unless asked for).
    """

    logprobs: Tensor
    entropies: Tensor
    hidden: Tensor | None


def tree_mask(tree: Tree, device: torch.device) -> Tensor:
    """Who may look at whom: bool (1, 1, N, N), True where kv is q or an ancestor of q."""
    node = torch.arange(len(tree.tokens), device=device)
    end = torch.tensor(tree.end, device=device)
    return ((node[None, :] <= node[:, None]) & (node[:, None] < end[None, :]))[None, None]


def sampled_edges(rows: Sequence[Row], tree: Tree) -> tuple[list[int], list[int]]:
    """(parent node, token) of every sampled token, row after row."""
    parents: list[int] = []
    labels: list[int] = []
    for row, path in zip(rows, tree.paths, strict=True):
        edges = list(pairwise(path))[len(row.prompt_ids) - 1 :]
        parents.extend(parent for parent, _ in edges)
        labels.extend(row.sampled_ids)
    return parents, labels


def score_rows(
    model: Any, rows: Sequence[Row], *, entropy: bool = False, hidden: bool = False
) -> Scored:
    """Score the sampled tokens of `rows` in one forward."""
    device = next(model.parameters()).device
    tree = build_tree([row.ids for row in rows])
    parents, labels = sampled_edges(rows, tree)
    needed = sorted(set(parents))
    position = {node: index for index, node in enumerate(needed)}
    seen: list[Tensor] = []
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    try:
        logits = model(
            input_ids=torch.tensor([tree.tokens], device=device),
            attention_mask=tree_mask(tree, device),
            position_ids=torch.tensor([tree.depth], device=device),
            logits_to_keep=torch.tensor(needed, device=device),
            use_cache=False,
        ).logits[0]
    finally:
        hook.remove()
    picked = torch.tensor([position[parent] for parent in parents], device=device)
    temperatures = [row.temperature for row in rows for _ in row.sampled_ids]
    scaled = logits.float()[picked] / torch.tensor(temperatures, device=device)[:, None]
    distribution = torch.log_softmax(scaled, dim=-1)
    chosen = distribution.gather(1, torch.tensor(labels, device=device)[:, None])[:, 0]
    spread = torch.zeros_like(chosen)
    if entropy:
        with torch.no_grad():
            spread = -(distribution.exp() * distribution).sum(-1)
    return Scored(chosen, spread, seen[0][picked] if hidden else None)
