"""Compute log-probabilities from hidden states, without holding all logits at once.

The LM head runs over chunks of rows. A chunk's logits z become probabilities p, and these become
p·W, the expected output embedding. With W[token], the output embedding of the token, this gives
the gradient with respect to the hidden state h at temperature T, and the entropy:

    ∂ log p(token) / ∂h = (W[token] − p·W) / T
    entropy             = log Σ exp(z) − h·(p·W) / T

If sampling settings beside the temperature shaped the distribution, the chunk's logits are shaped
in the same way, and p covers the survivors only (gradient: `trainer.learners.replay.shaping`). If
the model caps its logits, c·tanh(z/c) as in Gemma 2 (arXiv:2408.00118 §2), each term above is
multiplied by the cap's slope, 1 − tanh²(z/c).

The backward pass needs no second product with the vocabulary, and no logits are kept.
Products are summed, and softmax is taken, in float32.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from store.values.sampling import Distribution
from trainer.batches import Row
from trainer.learners.kernels.layers import product
from trainer.learners.replay.shaping import History, Places, ShapedPlaces, score_shaped, shape

# Logits in a chunk, by device: 64 MiB in float32 on a CPU, 512 MiB on a GPU.
CHUNK: Final = {"cpu": 2**24, "cuda": 2**27}


class Head(NamedTuple):
    """A frozen LM head: logits = W·(scale·h) + bias, and cap·tanh(logits / cap) if capped.

    Shapes: `weight` (V, H), `bias` (V,).
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of_model(cls, model: Any) -> Self:
        """Return the head of a causal LM, with the scale and cap of its configuration."""
        config, module = model.config.get_text_config(), model.get_output_embeddings()
        return cls(
            weight=module.weight,
            bias=getattr(module, "bias", None),
            scale=getattr(config, "logit_scale", None)
            or 1 / (getattr(config, "logits_scaling", None) or 1.0),
            cap=getattr(config, "final_logit_softcapping", None),
        )

    @property
    def is_linear(self) -> bool:
        """Return whether the logits are a product of hidden states and weights alone."""
        return self.bias is None and self.cap is None

    def logits(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits (R, V) for scaled states (R, H), and the cap's slopes (R, V) or None."""
        logits = wide_product(states, self.weight)
        if self.bias is not None:
            logits += self.bias
        if self.cap is None:
            return logits, None
        logits.div_(self.cap).tanh_()
        slopes = 1 - logits.square()
        return logits.mul_(self.cap), slopes


class Shaping(NamedTuple):
    """The sampling settings for rows [start, stop), and the tokens before each (`history`)."""

    start: int
    stop: int
    distribution: Distribution
    history: History

    def part(self, start: int, stop: int) -> "Shaping":
        """Return the settings and the history of rows [start, stop) only."""
        history = self.history.part(start - self.start, stop - self.start)
        return Shaping(start, stop, self.distribution, history)


class HeadLogprobs(Function):
    """Compute log-probabilities and entropies of tokens after hidden states, under a frozen head.

    Shapes: `hidden` (R, H), scaled; `temperatures` (R,), `rows` and `labels` (M,): token m is
    `labels[m]` after `hidden[rows[m]]`. `shapings` cover the last rows; the earlier rows have only
    a temperature. Both results are (M,), in nats; entropies carry no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Head,
        temperatures: Tensor,
        rows: Tensor,
        labels: Tensor,
        shapings: Sequence[Shaping],
    ) -> tuple[Tensor, Tensor]:
        """Compute both results, and keep the expected output embeddings for the backward pass."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        order, counts = rows.argsort(stable=True), rows.bincount(minlength=len(hidden))
        logprobs = torch.empty(len(rows), dtype=wide, device=hidden.device)
        entropies = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        expected = torch.empty(hidden.shape, dtype=wide, device=hidden.device)
        # Each token's share and factor (`Replayed`): 1 unless settings or a cap shape logits.
        is_shaped = bool(shapings) or head.cap is not None
        replayed = torch.ones(2, len(rows), dtype=wide, device=hidden.device) if is_shaped else None
        size = max(1, CHUNK[hidden.device.type] // len(head.weight))
        ends = counts.cumsum(0).tolist()
        for start, stop, shaping in _chunks(len(hidden), size, shapings):
            tokens = order[ends[start - 1] if start else 0 : ends[stop - 1]]
            at, chosen = rows[tokens] - start, labels[tokens]
            states = hidden[start:stop]
            if shaping is None:
                results, factors = _score_plain(states, head, temperatures[start:stop], at, chosen)
                if replayed is not None:
                    replayed[1, tokens] = factors
            else:
                results, shares, factors = _score_shaped(
                    states, head, shaping.part(start, stop), at, chosen
                )
                assert replayed is not None
                replayed[:, tokens] = torch.stack([shares, factors])
            logprobs[tokens], entropies[start:stop], expected[start:stop] = results
        ctx.save_for_backward(expected, head.weight, temperatures, rows, labels, replayed)
        ctx.dtype = hidden.dtype
        token_entropies = entropies[rows]
        ctx.mark_non_differentiable(token_entropies)
        return logprobs, token_entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the log-probabilities with respect to `hidden`."""
        expected, weight, temperatures, rows, labels, replayed = ctx.saved_tensors
        share = own = d_logprobs / temperatures[rows]
        if replayed is not None:
            share = share * replayed[0]
            own = share * replayed[1]
        total = torch.zeros_like(temperatures).index_add_(0, rows, share)
        d_hidden = expected * -total[:, None]
        d_hidden.index_add_(0, rows, weight[labels].to(expected.dtype) * own[:, None])
        return d_hidden.to(ctx.dtype), None, None, None, None, None


# Log-probabilities of tokens, entropies of rows, and expected output embeddings of rows.
_Results = tuple[Tensor, Tensor, Tensor]


def _score_plain(
    states: Tensor, head: Head, temperatures: Tensor, at: Tensor, chosen: Tensor
) -> tuple[_Results, Tensor | float]:
    """Return the results for logits with a temperature only, and each token's slope of the cap.

    Token m is `chosen[m]` in row `at[m]`. Without a cap, the slope is 1.0 for all tokens.
    """
    logits, slopes = head.logits(states)
    logits /= temperatures[:, None]
    logp = torch.log_softmax(logits, -1)
    logprobs = logp[at, chosen]
    normaliser = logits[:, 0] - logp[:, 0]
    weights = logp.exp_()
    mean_logit = None if head.is_linear else torch.linalg.vecdot(weights, logits)
    if slopes is not None:
        weights *= slopes
    mean_embedding = wide_product(weights.to(states.dtype), head.weight.T)
    if mean_logit is None:
        mean_logit = (
            torch.linalg.vecdot(mean_embedding, states.to(mean_embedding.dtype)) / temperatures
        )
    return (logprobs, normaliser - mean_logit, mean_embedding), 1.0 if slopes is None else slopes[
        at, chosen
    ]


def _score_shaped(
    states: Tensor, head: Head, shaping: Shaping, at: Tensor, chosen: Tensor
) -> tuple[_Results, Tensor, Tensor]:
    """Return the results for shaped logits, and each token's share and factor (`Replayed`)."""
    logits, slopes = head.logits(states)
    shaped = shape(logits, shaping.distribution, shaping.history, at, chosen)
    values = score_shaped(shaped, at, chosen)
    weights, factors = values.weights, values.factors
    if slopes is not None:
        weights, factors = weights * slopes, factors * slopes[at, chosen]
    mean_embedding = wide_product(weights.to(states.dtype), head.weight.T)
    return (values.logprobs, values.entropies, mean_embedding), values.shares, factors


def _chunks(
    rows: int, size: int, shapings: Sequence[Shaping]
) -> Iterator[tuple[int, int, Shaping | None]]:
    """Yield ranges of at most `size` rows with the same settings (None: only a temperature)."""
    plain = shapings[0].start if shapings else rows
    parts: list[tuple[int, int, Shaping | None]] = [(0, plain, None)]
    parts += [(shaping.start, shaping.stop, shaping) for shaping in shapings]
    for first, last, shaping in parts:
        for start in range(first, last, size):
            yield start, min(start + size, last), shaping


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left · rightᵀ, summed and stored in float32 at least."""
    if left.dtype in (torch.float32, torch.float64):
        return product(left, right.T)
    if left.device.type == "cuda":
        return torch.mm(left, right.T, out_dtype=torch.float32)
    return product(left.float(), right.float().T)


def head_logprobs(
    hidden: Tensor, head: Head, places: Places, sampled_by: Sequence[Row], labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies (M,) of sampled tokens.

    Shapes: `hidden` (N, H), unscaled; `labels` (M,), the sampled tokens of the rows `sampled_by`.
    `places` has the state that each token follows. Tokens with the same place share its logits.
    """
    device = hidden.device
    wide = torch.promote_types(hidden.dtype, torch.float32)
    states = hidden[torch.tensor(places.nodes, device=device)]
    logp, entropies = HeadLogprobs.apply(
        states if head.scale == 1.0 else states * head.scale,
        head,
        torch.tensor(places.temperatures, device=device, dtype=wide),
        torch.tensor(places.of_tokens, device=device),
        labels,
        [_shaping(group, sampled_by, device) for group in places.groups],
    )
    return logp, entropies


def _shaping(group: ShapedPlaces, rows: Sequence[Row], device: torch.device) -> Shaping:
    history = History.at_places(rows, group.histories, device)
    return Shaping(group.start, group.stop, group.distribution, history)


def head_kl(own: Tensor, other: Tensor, head: Head) -> Tensor:
    """Return KL(own ‖ other), (M,) in nats, of token distributions after hidden states (M, H).

    The head turns both into distributions. The KL is exact, over the whole vocabulary:
    KL(π ‖ ρ) = Σ π(token) · (log π(token) − log ρ(token)). It carries no gradient.
    """
    # Both policies' logits are in memory at once.
    size = max(1, CHUNK[own.device.type] // (2 * len(head.weight)))
    chunks = zip((own * head.scale).split(size), (other * head.scale).split(size), strict=True)
    parts = [logits_kl(head.logits(here)[0], head.logits(there)[0]) for here, there in chunks]
    return torch.cat(parts)


def logits_kl(own: Tensor, other: Tensor) -> Tensor:
    """Return KL(own ‖ other), (M,) in nats, of the softmax of logits (M, V)."""
    wide = torch.promote_types(own.dtype, torch.float32)
    here, there = torch.log_softmax(own.to(wide), -1), torch.log_softmax(other.to(wide), -1)
    difference = there.neg_().add_(here)
    # Rounding may leave values slightly below zero.
    divergence: Tensor = torch.linalg.vecdot(here.exp_(), difference)
    return divergence.clamp_(min=0.0)
