"""Weigh calls: give each its share of the update's loss, 1 in sum (pure).

The recipe's `equal_weight` says what has the same weight:

- `episode`: each trained episode, divided equally among its trained calls.
- `call`: each trained call.
- `token`: each sampled token. Like Dr. GRPO (arXiv:2503.20783 §3.2) this leaves out the mean
  over a call's own tokens; the divisor is the update's token count instead of a constant.
"""

from collections.abc import Sequence

from trainer.recipes.credit import CreditOptions


def loss_weights(sampled: Sequence[Sequence[int | None]], rule: CreditOptions) -> list[list[float]]:
    """Return each call's loss weight, by episode.

    `sampled` holds each call's number of sampled tokens, or None for a call that is not
    trained, whose weight is 0.
    """
    if rule.equal_weight == "episode":
        counts = [sum(count is not None for count in own) for own in sampled]
        episodes = sum(1 for count in counts if count)
        return [
            [0.0 if tokens is None else 1.0 / (episodes * count) for tokens in own]
            for own, count in zip(sampled, counts, strict=True)
        ]
    sizes = [[_size(count, rule) for count in own] for own in sampled]
    total = sum(size for own in sizes for size in own)
    return [[size / total if size else 0.0 for size in own] for own in sizes]


def _size(sampled: int | None, rule: CreditOptions) -> int:
    if sampled is None:
        return 0
    return max(sampled, 1) if rule.equal_weight == "token" else 1
