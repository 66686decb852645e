"""Find the tokens that min-p, top-k and top-p leave, as vLLM does (`topk_topp_sampler.py`).

Each rule is a floor under the logits: what lies on it survives. vLLM's own floor may part equal
logits at the edge of top-p; here they all survive, as they do with top-k in both.
"""

import math
from typing import Final

from torch import Tensor

from store.values.distribution import Distribution

# A nucleus is looked for among this many tokens first, and only then among all.
TRIED: Final = 1024


def drop_the_rest(logits: Tensor, distribution: Distribution) -> None:
    """Set the logits (R, V) of tokens that do not survive to −∞, in place."""
    if distribution.min_p > 0:
        _drop(logits, logits.amax(-1, keepdim=True) + math.log(distribution.min_p))
    if 0 < distribution.top_k < logits.shape[-1]:
        _drop(logits, logits.topk(distribution.top_k).values[:, -1:])
    if distribution.top_p < 1:
        _drop(logits, _nucleus_floor(logits, distribution.top_p))


def _drop(logits: Tensor, floor: Tensor) -> None:
    logits.masked_fill_(logits < floor, -math.inf)


def _nucleus_floor(logits: Tensor, share: float) -> Tensor:
    """Return the smallest logit of each row's nucleus, (R, 1).

    A token is in it if those above it have less than `share` of the probability together; the
    likeliest always is.
    """
    whole, words = logits.logsumexp(-1, keepdim=True), logits.shape[-1]
    for count in sorted({min(TRIED, words), words}):
        best = logits.topk(count).values
        shares = (best - whole).exp()
        sums = shares.cumsum(-1)
        inside = sums - shares < share
        inside[:, 0] = True
        if count == words or bool((sums[:, -1] >= share).all()):
            break
    return best.gather(1, inside.sum(-1, keepdim=True) - 1)
