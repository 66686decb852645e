"""A call's share of the update's loss: shares sum to 1 (pure).

`episode`: every trained episode has the same, divided among its calls that are trained. `call`:
every call. `token`: every sampled token, as Dr. GRPO leaves the mean over a call's tokens out
(arXiv:2503.20783 §3.2), but divided by the update's tokens instead of a constant.
"""

from collections.abc import Sequence

from trainer.recipe_parts import CreditPart


def weights(sampled: Sequence[Sequence[int | None]], rule: CreditPart) -> list[list[float]]:
    """Of each call of each episode.

    `sampled` says how many tokens it sampled; None: it is not trained, and has no share.
    """
    if rule.equal_weight == "episode":
        counts = [sum(count is not None for count in own) for own in sampled]
        episodes = sum(1 for count in counts if count)
        return [
            [0.0 if tokens is None else 1.0 / (episodes * count) for tokens in own]
            for own, count in zip(sampled, counts, strict=True)
        ]
    sizes = [[_size(count, rule) for count in own] for own in sampled]
    whole = sum(size for own in sizes for size in own)
    return [[size / whole if size else 0.0 for size in own] for own in sizes]


def _size(sampled: int | None, rule: CreditPart) -> int:
    if sampled is None:
        return 0
    return max(sampled, 1) if rule.equal_weight == "token" else 1
