"""A call's share of the update's loss: shares sum to 1 (pure).

`episode`: every trained episode has the same, divided among its calls that are trained. `call`:
every call. `token`: every sampled token, as Dr. GRPO leaves the mean over a call's tokens out
(arXiv:2503.20783 §3.2), but divided by the update's tokens instead of a constant.
"""

from collections.abc import Sequence

from trainer.recipe_parts import CreditPart


def weights(sampled: Sequence[Sequence[int]], rule: CreditPart) -> list[list[float]]:
    """Of each trained call of each episode; `sampled` says how many tokens it sampled."""
    if rule.equal_weight == "episode":
        episodes = sum(1 for own in sampled if own)
        return [[1.0 / (episodes * len(own)) for _ in own] for own in sampled]
    by_token = rule.equal_weight == "token"
    sizes = [[max(count, 1) if by_token else 1 for count in own] for own in sampled]
    whole = sum(size for own in sizes for size in own)
    return [[size / whole for size in own] for own in sizes]
