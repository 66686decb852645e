"""Compute log-probabilities from hidden states, without holding all logits at once.

The LM head runs over chunks of rows. A chunk's logits z become probabilities p and at once
p·W, the expected output embedding. With W[token], the token's output embedding, this gives
the gradient with respect to the hidden state h at temperature T, and the entropy:

    ∂ log p(token) / ∂h = (W[token] − p·W) / T
    entropy             = log Σ exp(z) − h·(p·W) / T

The backward pass needs no second product with the vocabulary, and no logits are kept.
Products are summed, and softmax is taken, in float32.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trainer.learners.kernels.products import product

# Logits in a chunk, by device: 64 MiB in float32 on a CPU, 512 MiB on a GPU.
CHUNK: Final = {"cpu": 2**24, "cuda": 2**27}


class HeadLogprobs(Function):
    """Compute log-probabilities and entropies of tokens after hidden states, under a frozen head.

    Shapes: `hidden` (R, H), `head` (V, H), `temperatures` (R,), `rows` and `labels` (M,):
    token m is `labels[m]` after `hidden[rows[m]]`. Both results are (M,), in nats; entropies
    carry no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        temperatures: Tensor,
        rows: Tensor,
        labels: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute both results, and keep the expected output embeddings for the backward pass."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        order, counts = rows.argsort(stable=True), rows.bincount(minlength=len(hidden))
        logprobs = torch.empty(len(rows), dtype=wide, device=hidden.device)
        entropies = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        expected = torch.empty(hidden.shape, dtype=wide, device=hidden.device)
        size = max(1, CHUNK[hidden.device.type] // len(head))
        ends = counts.cumsum(0).tolist()
        for start in range(0, len(hidden), size):
            stop = min(start + size, len(hidden))
            tokens = order[ends[start - 1] if start else 0 : ends[stop - 1]]
            logits = _wide_product(hidden[start:stop], head)
            logits /= temperatures[start:stop, None]
            logp = torch.log_softmax(logits, -1)
            logprobs[tokens] = logp[rows[tokens] - start, labels[tokens]]
            normaliser = logits[:, 0] - logp[:, 0]
            mean = _wide_product(logp.exp_().to(hidden.dtype), head.T)
            along = torch.linalg.vecdot(mean, hidden[start:stop].to(wide))
            entropies[start:stop] = normaliser - along / temperatures[start:stop]
            expected[start:stop] = mean
        ctx.save_for_backward(expected, head, temperatures, rows, labels)
        ctx.dtype = hidden.dtype
        spread = entropies[rows]
        ctx.mark_non_differentiable(spread)
        return logprobs, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the log-probabilities with respect to `hidden`."""
        expected, head, temperatures, rows, labels = ctx.saved_tensors
        share = d_logprobs / temperatures[rows]
        total = torch.zeros_like(temperatures).index_add_(0, rows, share)
        d_hidden = expected * -total[:, None]
        d_hidden.index_add_(0, rows, head[labels].to(expected.dtype) * share[:, None])
        return d_hidden.to(ctx.dtype), None, None, None, None


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left · rightᵀ, summed and stored in float32 at least."""
    if left.dtype in (torch.float32, torch.float64):
        return product(left, right.T)
    if left.device.type == "cuda":
        return torch.mm(left, right.T, out_dtype=torch.float32)
    return product(left.float(), right.float().T)


def head_logprobs(
    hidden: Tensor,
    head: Tensor,
    temperatures: Sequence[float],
    parents: Sequence[int],
    labels: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies (M,) of tokens after the nodes before them.

    Shapes: `hidden` (N, H); `temperatures`, `parents` (a token's node) and `labels` (M,).
    Tokens that follow one node at one temperature share its logits.
    """
    pairs = list(zip(parents, temperatures, strict=True))
    place = {pair: index for index, pair in enumerate(sorted(set(pairs)))}
    device = hidden.device
    nodes = torch.tensor([node for node, _ in place], device=device)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    degrees = torch.tensor([t for _, t in place], device=device, dtype=wide)
    rows = torch.tensor([place[pair] for pair in pairs], device=device)
    logp, entropies = HeadLogprobs.apply(hidden[nodes], head, degrees, rows, labels)
    return logp, entropies
