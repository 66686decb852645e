"""Make rows of ordinary text for probes, and rows and a random adapter for self-tests.

A self-test finds out, without an episode, whether servers load the trainer's adapters, and whether
there is memory for an update (`trainer.updates.self_test`).
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

# The effect of a self-test's adapter on log-probabilities, in nats a token: far above the rounding
# of bfloat16 (0.05), and so small that server and trainer still agree (at 6 nats they differ by 2
# for a model of 1.5B).
LEAST_EFFECT: Final = 0.3
MOST_EFFECT: Final = 0.8
# A smaller effect counts as none.
NO_EFFECT: Final = 1e-3
# Standard deviations of the adapter's second matrices: the first to try, the largest, and how many
# to try at most.
FIRST_SPREAD: Final = 0.01
LARGEST_SPREAD: Final = 10.0
MOST_SPREADS: Final = 30
# The most tokens in a row of a rehearsal: any model's context is longer.
LONGEST_REHEARSED: Final = 128
# Ordinary text, because random ids have log-probabilities so low that bfloat16 differs by more than
# the tolerance. Half of each text is the prompt.
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
# Tokenizers are compared by about so many plain tokens, and as many added ones.
PROBED_TOKENS: Final = 256


def probe_rows(tokenizer: Any) -> list[Row]:
    """Return a row for each probe text; the rows are the same for every version.

    They have no text from episodes: a version's manifest keeps them, and episodes can be deleted.
    """
    rows = []
    for number, text in enumerate(PROBE_TEXTS):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        # Repeated, because some tokenizers encode a text with few ids.
        ids = (ids * PROBE_LENGTH)[:PROBE_LENGTH]
        rows.append(bare_row(number, ids[: PROBE_LENGTH // 2], ids[PROBE_LENGTH // 2 :]))
    return rows


def vocabulary_probe(tokenizer: Any) -> tuple[str, list[int]]:
    """Return a text of tokens from all over the vocabulary, and its ids by this tokenizer.

    Other tokenizers give it other ids. Added tokens are included, because the tokenizers of one
    model family differ in them.
    """
    kinds = (range(len(tokenizer)), sorted(tokenizer.get_added_vocab().values()))
    tokens = [token for ids in kinds for token in ids[:: max(1, len(ids) // PROBED_TOKENS)]]
    text = " ".join(tokenizer.decode([token]) for token in tokens)
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def randomise_adapter(model: Any, rows: Sequence[Row], seed: int) -> None:
    """Give the new adapter of `model` random weights that change the log-probabilities of `rows`.

    The mean change is between `LEAST_EFFECT` and `MOST_EFFECT`, or the largest smaller change if
    none is. The random weights are the layers' second matrices. They follow from `seed`, and their
    spread is found by bisection.

    Raises:
        NoEffect: no spread has an effect between `NO_EFFECT` and `MOST_EFFECT`.
    """
    before = _model_logprobs(model, rows)
    matrices = [weights for name, weights in model.named_parameters() if "lora_B" in name]
    effects: dict[float, float] = {}
    spread, below, above = FIRST_SPREAD, 0.0, math.inf
    while len(effects) < MOST_SPREADS and spread <= LARGEST_SPREAD:
        _randomise_weights(matrices, spread, seed)
        effect = effects[spread] = float((_model_logprobs(model, rows) - before).abs().mean())
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
            "an adapter of these layers changes nothing: set lora.target_modules to other linear"
            " layers of the model, or leave it out"
        )
    _randomise_weights(matrices, best, seed)


@torch.no_grad()
def _randomise_weights(matrices: Sequence[torch.Tensor], spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weights in matrices:
        weights.copy_(torch.randn(weights.shape, generator=generator) * spread)


def _model_logprobs(model: Any, rows: Sequence[Row]) -> torch.Tensor:
    with torch.no_grad():
        return score_rows(model, rows, layout="whole").logprobs


def rehearsal_rows(texts: Sequence[Row], tokens: int) -> list[Row]:
    """Return short made-up rows for a rehearsal, of about `tokens` tokens together.

    Their ids are those of `texts`, repeated. Half of them have a positive advantage, half a
    negative one.
    """
    ids = [token for row in texts for token in row.ids]
    length = max(4, min(LONGEST_REHEARSED, tokens // 2))
    count = 2 * max(1, tokens // length // 2)
    rows = []
    for number in range(count):
        own = list(islice(cycle(ids), number, number + length))
        rows.append(_made_up_row(number, own, length - length // 2, 1 / count))
    return rows


def growing_rows(ids: Sequence[int], turns: int, context: int, episodes: int = 2) -> list[Row]:
    """Return rows of made-up episodes of one task, whose calls grow to about `context` tokens.

    Each call repeats the call before it and adds tokens, an eighth of them sampled. The ids are
    those of `ids`, repeated. Every second episode has a positive advantage, and half of its sampled
    tokens are thoughts, which later calls leave out.
    """
    added = max(2, context // turns)
    sampled = max(1, added // 8)
    rows = []
    for episode in range(episodes):
        thoughts = sampled // 2 if episode % 2 else 0
        so_far: list[int] = []
        for turn in range(turns):
            so_far += islice(cycle(ids), turn * added, (turn + 1) * added)
            # Episodes share the tokens of the task up to the first token that is set here.
            so_far[added // 2 - added] = ids[(episode + turn) % len(ids)]
            weight = 1 / (episodes * turns)
            rows.append(_made_up_row(episode, so_far, sampled, weight, position=turn))
            del so_far[len(so_far) - sampled : len(so_far) - sampled + thoughts]
    return rows


def _made_up_row(
    episode: int, ids: Sequence[int], sampled: int, weight: float, position: int = 0
) -> Row:
    """Return a row with `sampled` sampled tokens; odd episodes have a positive advantage."""
    advantage = 1.0 if episode % 2 else -1.0
    return msgspec.structs.replace(
        bare_row(episode, ids[:-sampled], ids[-sampled:]),
        position=position,
        advantage=advantage,
        r_total=advantage,
        weight=weight,
        recomputed=True,
    )
