"""Shape logits as the server shaped its own, in its order (`store.values.distribution`).

Masks come after penalties here and before them there: −∞ stays −∞ under every bias and penalty.
The sampled token always counts as a survivor, though rounding may have put it past an edge that
it was inside of. With T the temperature, f a token's factor (1, or what a repetition penalty
multiplies its logit by), p the softmax over the other survivors, and q the sampled token's share
where it is not among these:

    ∂ log p(token) / ∂ z = (1 − q) · (f[token] · 1[token] − p ∘ f) / T
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from store.values.distribution import Distribution
from trainer.learners.replay.grammars import allowed
from trainer.learners.replay.history import History
from trainer.learners.replay.survivors import drop_the_rest


class Factors(NamedTuple):
    """Hold by what the logits of tokens that were there before were multiplied.

    Shapes: `ids` and `values` are (R, T). An id may be there several times, with one value.
    """

    ids: Tensor
    values: Tensor

    def multiply(self, tensor: Tensor) -> Tensor:
        """Multiply a tensor (R, V) by the factors, in place, and return it."""
        return tensor.scatter_(1, self.ids, tensor.gather(1, self.ids) * self.values)

    def of(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return the factors of tokens `labels` in rows `rows`, (M,)."""
        same = self.ids[rows] == labels[:, None]
        values = self.values[rows].gather(1, same.int().argmax(1)[:, None])[:, 0]
        return torch.where(same.any(1), values, 1.0)


class Shaped(NamedTuple):
    """Hold shaped logits (R, V), −∞ for what does not survive; the sampled tokens' own, (M,).

    `sampled` are the logits of M sampled tokens, as they are if these survive. `factors` is None
    without a repetition penalty.
    """

    logits: Tensor
    sampled: Tensor
    factors: Factors | None


def shape(
    logits: Tensor, distribution: Distribution, history: History, rows: Tensor, labels: Tensor
) -> Shaped:
    """Shape logits (R, V), in place; sampled token m is `labels[m]` after `rows[m]`."""
    _add_bias(logits, distribution)
    factors = _penalise(logits, distribution, history)
    logits /= distribution.temperature
    sampled = logits[rows, labels]
    _forbid(logits, distribution, history)
    drop_the_rest(logits, distribution)
    return Shaped(logits, sampled, factors)


def _add_bias(logits: Tensor, distribution: Distribution) -> None:
    if distribution.logit_bias:
        tokens, biases = zip(*distribution.logit_bias, strict=True)
        logits[:, list(tokens)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)


def _penalise(logits: Tensor, distribution: Distribution, history: History) -> Factors | None:
    """Apply the penalties in place: for repetition, then by frequency, then for presence."""
    factors = None
    if distribution.repetition_penalty != 1:
        factors = _repetition(logits, distribution.repetition_penalty, history)
        factors.multiply(logits)
    if distribution.frequency_penalty or distribution.presence_penalty:
        ids, there = history.reply()
        times = there.to(logits.dtype)
        logits.scatter_add_(1, ids, times * -distribution.frequency_penalty)
        # A reply's first id stands where it has no more, and nothing changes where it is empty.
        once = logits.gather(1, ids) - distribution.presence_penalty * times[:, :1]
        logits.scatter_(1, ids, once)
    return factors


def _repetition(logits: Tensor, penalty: float, history: History) -> Factors:
    """Return the factors of all tokens that were there before: a logit above 0 is divided."""
    ids = history.everything()
    above = logits.gather(1, ids) > 0
    values = torch.where(above, 1 / penalty, torch.tensor(penalty, dtype=logits.dtype))
    return Factors(ids, values)


def _forbid(logits: Tensor, distribution: Distribution, history: History) -> None:
    """Set the logits of tokens that could not be sampled to −∞, in place."""
    if distribution.grammar is not None:
        could = allowed(history.masks, logits.shape[-1], logits.device)
        logits.masked_fill_(~could, -math.inf)
    if distribution.allowed_token_ids:
        others = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
        others[list(distribution.allowed_token_ids)] = False
        logits.masked_fill_(others, -math.inf)
    for *begun, last in distribution.banned_ids:
        logits[:, last].masked_fill_(history.ends_in(begun), -math.inf)
    if distribution.min_tokens and distribution.stop_token_ids:
        stops = list(distribution.stop_token_ids)
        too_early = history.sampled < distribution.min_tokens
        logits[:, stops] = logits[:, stops].masked_fill(too_early[:, None], -math.inf)


class Replayed(NamedTuple):
    """Hold what M sampled tokens and R distributions come to.

    Shapes: `logprobs` (M,) in nats; `shares` (M,), 1 − q; `factors` (M,), those of the sampled
    tokens; `entropies` (R,) of the survivors; `weights` (R, V), p ∘ f.
    """

    logprobs: Tensor
    shares: Tensor
    factors: Tensor
    entropies: Tensor
    weights: Tensor


def replay(shaped: Shaped, rows: Tensor, labels: Tensor) -> Replayed:
    """Return what shaped logits come to; their memory becomes that of `weights`."""
    logits, sampled, factors = shaped
    whole = logits.logsumexp(-1)
    survives = logits[rows, labels] > -math.inf
    among = torch.where(survives, whole[rows], torch.logaddexp(whole[rows], sampled))
    # Where nothing survives beside the sampled token, p is 0 everywhere.
    least = torch.finfo(logits.dtype).min
    weights = logits.sub_(whole.clamp(min=least)[:, None]).exp_()
    entropies = torch.special.entr(weights).sum(-1)
    return Replayed(
        logprobs=sampled - among,
        shares=torch.where(survives, 1.0, (whole[rows] - among).exp()),
        factors=torch.ones_like(sampled) if factors is None else factors.of(rows, labels),
        entropies=entropies,
        weights=weights if factors is None else factors.multiply(weights),
    )


def reshaped(
    logits: Tensor, distribution: Distribution, history: History, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies (S,) of tokens with logits (S, V), for autograd.

    The shaped values are computed beside the graph, and their derivative is put back in: this is
    the reference for `replay`, which keeps no logits.
    """
    rows = torch.arange(len(labels), device=logits.device)
    with torch.no_grad():
        values, sampled, factors = shape(
            logits.detach().clone(), distribution, history, rows, labels
        )
        survivors = torch.log_softmax(values, -1)
        entropies = torch.special.entr(survivors.exp()).sum(-1)
        values[rows, labels] = sampled
        slopes = torch.full_like(values, 1 / distribution.temperature)
        if factors is not None:
            factors.multiply(slopes)
    shaped = values + (logits - logits.detach()) * slopes
    return torch.log_softmax(shaped, -1).gather(1, labels[:, None])[:, 0], entropies
