"""Make what a self-test and a probe need: rows of ordinary text, and an adapter with an effect.

A self-test finds out whether a server would take what the trainer makes, and whether there is
memory for an update, without an episode (`trainer.updates.self_test`).
"""

import math
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any, Final

import msgspec
import torch

from trainer.batches import Row, bare_row
from trainer.errors import NoEffect
from trainer.learners.scoring import score_rows

# The effect of a self-test's adapter, in nats a token: far over what bfloat16 differs by (0.05),
# and where models still compute alike (at 6 nats a model of 1.5B differs by 2).
LEAST_EFFECT: Final = 0.3
MOST_EFFECT: Final = 0.8
# An effect of less is none.
NO_EFFECT: Final = 1e-3
# The spread of its second matrices that is tried first, the largest, and how many are tried.
FIRST_SPREAD: Final = 0.01
LARGEST_SPREAD: Final = 10.0
MOST_SPREADS: Final = 30
# The most tokens in a row of a rehearsal: any model has room for it.
LONGEST: Final = 128
# Both sides are sure enough of ordinary text to be compared; random ids have log-probabilities so
# low that bfloat16 differs by more than the tolerance. Half of each text is the prompt.
PROBE_TEXTS: Final = (
    "The river rises in the hills north of the town and runs past the old mill to the sea. In the"
    " spring it carries the snow of the whole valley, and the bridge is closed for a week.",
    "Question: a train leaves at nine and needs two hours and a half. When does it arrive? Answer:"
    " it arrives at half past eleven, because nine and two is eleven, and half an hour is left.",
    "To make the soup, wash the vegetables and cut them into small pieces. Boil two litres of water"
    " with a little salt, put everything in, and let it cook over a low fire until it is soft.",
    '{"name": "search", "arguments": {"query": "opening hours of the library", "limit": 3}} The'
    " library is open from ten to six on weekdays, and from ten to two on Saturdays.",
)
PROBE_LENGTH: Final = 32
# Words, plain or added, that tokenizers are compared by.
PROBED_WORDS: Final = 256


def probe_rows(tokenizer: Any) -> list[Row]:
    """Return a row for each text, to compare the served log-probabilities of.

    They are the same for every version. Nothing of an episode is in them, so that a version's
    manifest keeps nothing that somebody may want to be deleted.
    """
    rows = []
    for number, text in enumerate(PROBE_TEXTS):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        # A tokenizer of few words has few ids for a text.
        ids = (ids * PROBE_LENGTH)[:PROBE_LENGTH]
        rows.append(bare_row(number, ids[: PROBE_LENGTH // 2], ids[PROBE_LENGTH // 2 :]))
    return rows


def vocabulary_probe(tokenizer: Any) -> tuple[str, list[int]]:
    """Return a text of words from all over the vocabulary, and its ids.

    Another tokenizer gives it other ids. Added tokens are among the words: in these the
    tokenizers of one family differ.
    """
    kinds = (range(len(tokenizer)), sorted(tokenizer.get_added_vocab().values()))
    words = [one for ids in kinds for one in ids[:: max(1, len(ids) // PROBED_WORDS)]]
    text = " ".join(tokenizer.decode([word]) for word in words)
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def nudge(model: Any, rows: Sequence[Row], seed: int) -> None:
    """Give the new adapter of `model` an effect of `LEAST_EFFECT` to `MOST_EFFECT` on `rows`.

    The weights of its layers become random numbers that follow from `seed`; their spread is found
    by halving the interval. A model that is hardly sure of anything is moved as far as it can be.

    Raises:
        NoEffect: nothing moves it.
    """
    before = _logprobs(model, rows)
    moved = [weights for name, weights in model.named_parameters() if "lora_B" in name]
    effects: dict[float, float] = {}
    spread, below, above = FIRST_SPREAD, 0.0, math.inf
    while len(effects) < MOST_SPREADS and spread <= LARGEST_SPREAD:
        _spread_out(moved, spread, seed)
        effect = effects[spread] = float((_logprobs(model, rows) - before).abs().mean())
        if LEAST_EFFECT <= effect <= MOST_EFFECT:
            return
        if effect < LEAST_EFFECT:
            below = spread
        else:
            above = spread
        spread = 2 * spread if above == math.inf else (below + above) / 2
    weak = {spread: effect for spread, effect in effects.items() if effect < LEAST_EFFECT}
    best = max(weak, key=weak.__getitem__, default=None)
    if best is None or weak[best] < NO_EFFECT:
        raise NoEffect(
            "an adapter of these layers changes nothing: set lora.target_modules to linear layers"
            " of the model, or leave it out"
        )
    _spread_out(moved, best, seed)


@torch.no_grad()
def _spread_out(moved: Sequence[torch.Tensor], spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weights in moved:
        weights.copy_(torch.randn(weights.shape, generator=generator) * spread)


def _logprobs(model: Any, rows: Sequence[Row]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([score_rows(model, [row], way="whole").logprobs for row in rows])


def rehearsal_rows(texts: Sequence[Row], tokens: int) -> list[Row]:
    """Return rows of about `tokens` tokens together, none of them long, to train on.

    They repeat the ids of `texts`; half of them count as good and half as bad.
    """
    ids = [token for row in texts for token in row.ids]
    length = max(4, min(LONGEST, tokens // 2))
    count = 2 * max(1, tokens // length // 2)
    rows = []
    for number in range(count):
        own = list(islice(cycle(ids), number, number + length))
        rows.append(_judged(number, own, length - length // 2, 1 / count))
    return rows


def growing_rows(ids: Sequence[int], turns: int, context: int, episodes: int = 2) -> list[Row]:
    """Return episodes of one task, whose calls repeat all before them and grow to `context` tokens.

    They repeat `ids`; every second episode counts as good, and an eighth of what a call adds was
    sampled. In these episodes half of that are thoughts, which later calls leave out.
    """
    added = max(2, context // turns)
    sampled = max(1, added // 8)
    rows = []
    for episode in range(episodes):
        thoughts = sampled // 2 if episode % 2 else 0
        said: list[int] = []
        for turn in range(turns):
            said += islice(cycle(ids), turn * added, (turn + 1) * added)
            # The task's first words are shared, and then each episode goes its own way.
            said[added // 2 - added] = ids[(episode + turn) % len(ids)]
            weight = 1 / (episodes * turns)
            rows.append(_judged(episode, said, sampled, weight, position=turn))
            del said[len(said) - sampled : len(said) - sampled + thoughts]
    return rows


def _judged(
    episode: int, ids: Sequence[int], sampled: int, weight: float, position: int = 0
) -> Row:
    """Return a row whose last ids were sampled; every second episode counts as good."""
    advantage = 1.0 if episode % 2 else -1.0
    return msgspec.structs.replace(
        bare_row(episode, ids[:-sampled], ids[-sampled:]),
        position=position,
        advantage=advantage,
        r_total=advantage,
        weight=weight,
        recomputed=True,
    )
