"""Apply sampling settings to logits, as the model server did, in its order.

The order is that of `store.values.sampling`, but for masks: they come after penalties here and
before them there, with the same result, as −∞ stays −∞ under every bias and penalty. Survivors are
the tokens that no setting excludes. The sampled token always counts as one, because rounding may
put it just outside top-k, top-p or min-p. Let T be the temperature, f a token's factor (1, or the
factor by which a repetition penalty multiplies its logit), p the softmax over the survivors, and q
the sampled token's share if rounding dropped it, else 0:

    ∂ log p(token) / ∂ z = (1 − q) · (f[token] · 1[token] − p ∘ f) / T
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Self

import msgspec
import torch
from torch import Tensor

from store.values.sampling import Distribution
from trainer.batches import Row
from trainer.learners.replay.grammars import allowed_tokens

Ids = tuple[int, ...]


# The nucleus of top-p is searched among this many likeliest tokens first, and then among all.
NUCLEUS_CANDIDATES: Final = 1024


class Vocabulary:
    """Fill in the token ids of banned words and of stop tokens in sampling settings, as vLLM does.

    The rules are those of `update_from_tokenizer` and `update_from_generation_config` of its
    `SamplingParams` (`vllm/sampling_params.py`).
    """

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self._tokenizer = tokenizer
        own = getattr(model.generation_config, "eos_token_id", None)
        listed = own if isinstance(own, list) else [own]
        self._ends = {end for end in (*listed, tokenizer.eos_token_id) if end is not None}

    def with_token_ids(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows, with token ids for banned words and stop tokens in their settings."""
        with_ids = {
            distribution: self.settings_with_token_ids(distribution)
            for distribution in {row.distribution for row in rows}
        }
        return [
            row
            if with_ids[row.distribution] is row.distribution
            else msgspec.structs.replace(row, distribution=with_ids[row.distribution])
            for row in rows
        ]

    def settings_with_token_ids(self, settings: Distribution) -> Distribution:
        """Return settings with the token ids of their banned words and of the stop tokens."""
        if settings.bad_words:
            settings = msgspec.structs.replace(
                settings, banned_ids=banned_sequences(settings.bad_words, self._encode)
            )
        if settings.min_tokens or settings.grammar is not None:
            stops = self._ends.union(settings.stop_token_ids)
            settings = msgspec.structs.replace(settings, stop_token_ids=tuple(sorted(stops)))
        return settings

    def _encode(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def banned_sequences(
    words: Iterable[str], encode: Callable[[str], Sequence[int]]
) -> tuple[Ids, ...]:
    """Return sequences of token ids, the banned words, that no sampled token may complete.

    As in vLLM, the ids of a word after a space are banned, too, if they are as many and begin with
    another id.
    """
    sequences: list[Ids] = []
    for word in words:
        alone, inside = (tuple(encode(space + word.lstrip())) for space in ("", " "))
        if alone:
            sequences.append(alone)
        if alone and inside and inside[0] != alone[0] and len(inside) == len(alone):
            sequences.append(inside)
    return tuple(sequences)


class ShapedPlaces(NamedTuple):
    """Places [start, stop) with the same settings, more than a temperature (see `Places`).

    `histories` has, for each place, the index of a row and the number of its tokens sampled before.
    """

    start: int
    stop: int
    distribution: Distribution
    histories: tuple[tuple[int, int], ...]


class Places(NamedTuple):
    """The R distributions (places) from which M tokens were sampled, the plain ones first.

    Shapes: `nodes` and `temperatures` are (R,): the tree's node that a token follows, and its
    temperature; `of_tokens` (M,) has the place of each token, row after row.
    """

    nodes: list[int]
    temperatures: list[float]
    of_tokens: list[int]
    groups: tuple[ShapedPlaces, ...]


# A distribution's index, a node, and the prompt's length (0 if the settings need no history).
_Key = tuple[int, int, int]


def places_of(rows: Sequence[Row], parents: Sequence[int]) -> Places:
    """Return the places of the sampled tokens of `rows`; `parents` (M,) are the nodes before them.

    Two tokens share a place if they follow the same node with equal settings and, if these settings
    need the history, their prompts are equally long.
    """
    settings = sorted({row.distribution for row in rows}, key=_plain_first_key)
    number = {distribution: index for index, distribution in enumerate(settings)}
    keys: list[_Key] = []
    first: dict[_Key, tuple[int, int]] = {}
    for index, row in enumerate(rows):
        prompt_length = len(row.prompt_ids) if row.distribution.needs_history else 0
        setting = number[row.distribution]
        for sampled in range(len(row.sampled_ids)):
            key = (setting, parents[len(keys)], prompt_length)
            keys.append(key)
            first.setdefault(key, (index, sampled))
    ordered = sorted(first)
    place = {key: index for index, key in enumerate(ordered)}
    return Places(
        nodes=[node for _, node, _ in ordered],
        temperatures=[settings[setting].temperature for setting, _, _ in ordered],
        of_tokens=[place[key] for key in keys],
        groups=_group_places(settings, ordered, [first[key] for key in ordered]),
    )


def _plain_first_key(distribution: Distribution) -> tuple[bool, str]:
    """Return a sort key: plain settings first, then the same order in every process."""
    return not distribution.is_plain, repr(distribution)


def _group_places(
    settings: Sequence[Distribution],
    ordered: Sequence[_Key],
    histories: Sequence[tuple[int, int]],
) -> tuple[ShapedPlaces, ...]:
    groups = []
    stop = sum(1 for setting, _, _ in ordered if settings[setting].is_plain)
    while stop < len(ordered):
        start, setting = stop, ordered[stop][0]
        while stop < len(ordered) and ordered[stop][0] == setting:
            stop += 1
        groups.append(ShapedPlaces(start, stop, settings[setting], tuple(histories[start:stop])))
    return tuple(groups)


class History:
    """The tokens before each of R sampled tokens: the prompt, and the reply so far.

    Shapes: `ids` (B, L) are the ids of B rows, padded. The others are (R,): the index of the row in
    `rows`, the length of the prompt in `prompts`, and that of the reply so far in `sampled`.
    """

    def __init__(
        self,
        ids: Tensor,
        rows: Tensor,
        prompts: Tensor,
        sampled: Tensor,
        masks: Sequence[bytes] = (),
    ) -> None:
        """Store the tensors, and the packed masks (R,) if a grammar limited the tokens."""
        self._ids = ids
        self._rows = rows
        self._prompts = prompts
        self.sampled = sampled
        self.masks = masks

    @classmethod
    def at_places(
        cls, rows: Sequence[Row], places: Sequence[tuple[int, int]], device: torch.device
    ) -> Self:
        """Return the history at `places`: each is a row's index and its tokens sampled so far."""
        used = {row: index for index, row in enumerate(sorted({row for row, _ in places}))}
        ids = [torch.tensor(rows[row].ids, dtype=torch.long, device=device) for row in used]
        prompts = [len(rows[row].prompt_ids) for row, _ in places]
        return cls(
            torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
            torch.tensor([used[row] for row, _ in places], device=device),
            torch.tensor(prompts, device=device),
            torch.tensor([sampled for _, sampled in places], device=device),
            [rows[row].masks[sampled] for row, sampled in places if rows[row].masks],
        )

    def part(self, start: int, stop: int) -> "History":
        """Return the history of the sampled tokens [start, stop) only."""
        rows, prompts, sampled = (
            tensor[start:stop] for tensor in (self._rows, self._prompts, self.sampled)
        )
        return History(self._ids, rows, prompts, sampled, self.masks[start:stop])

    def ids_so_far(self) -> Tensor:
        """Return all ids before each sampled token, (R, T), padded with the first of them."""
        lengths = self._prompts + self.sampled
        places = torch.arange(int(lengths.max()), device=lengths.device)
        ids = self._ids[self._rows[:, None], places]
        return torch.where(places < lengths[:, None], ids, ids[:, :1])

    def reply(self) -> tuple[Tensor, Tensor]:
        """Return the reply's ids before each sampled token, (R, T), and a mask, False for padding.

        Shorter replies are padded with their first id, empty ones with any id.
        """
        places = torch.arange(max(1, int(self.sampled.max())), device=self.sampled.device)
        is_reply = places < self.sampled[:, None]
        at = torch.where(is_reply, places, 0) + self._prompts[:, None]
        return self._ids[self._rows[:, None], at], is_reply

    def reply_ends_in(self, ids: Sequence[int]) -> Tensor:
        """Return whether the reply before each token ends in these ids, (R,)."""
        wanted = torch.tensor(ids, dtype=torch.long, device=self.sampled.device)
        places = torch.arange(len(ids), device=self.sampled.device) - len(ids)
        ends = (self._prompts + self.sampled)[:, None]
        newest = self._ids[self._rows[:, None], (ends + places).clamp(min=0)]
        return (self.sampled >= len(ids)) & (newest == wanted).all(1)


class Factors(NamedTuple):
    """The factors by which a repetition penalty multiplied the logits of earlier tokens.

    Shapes: `ids` and `values` are (R, T). An id may occur several times, with the same value.
    """

    ids: Tensor
    values: Tensor

    def multiply(self, tensor: Tensor) -> Tensor:
        """Multiply a tensor (R, V) by the factors, in place, and return it."""
        return tensor.scatter_(1, self.ids, tensor.gather(1, self.ids) * self.values)

    def at(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return the factors of tokens `labels` in rows `rows`, (M,); 1 for tokens without one."""
        same = self.ids[rows] == labels[:, None]
        values = self.values[rows].gather(1, same.int().argmax(1)[:, None])[:, 0]
        return torch.where(same.any(1), values, 1.0)


class Shaped(NamedTuple):
    """Shaped logits (R, V), −∞ for tokens that do not survive.

    `sampled` (M,) are the logits that the sampled tokens have if they survive. `factors` is None
    without a repetition penalty.
    """

    logits: Tensor
    sampled: Tensor
    factors: Factors | None


def shape(
    logits: Tensor, distribution: Distribution, history: History, rows: Tensor, labels: Tensor
) -> Shaped:
    """Apply settings to logits (R, V), in place, and return them with the penalties' factors.

    Sampled token m is `labels[m]` at `rows[m]`.
    """
    _add_bias(logits, distribution)
    factors = _penalise(logits, distribution, history)
    logits /= distribution.temperature
    sampled = logits[rows, labels]
    _forbid_tokens(logits, distribution, history)
    drop_unlikely_tokens(logits, distribution)
    return Shaped(logits, sampled, factors)


def _add_bias(logits: Tensor, distribution: Distribution) -> None:
    if distribution.logit_bias:
        tokens, biases = zip(*distribution.logit_bias, strict=True)
        logits[:, list(tokens)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)


def _penalise(logits: Tensor, distribution: Distribution, history: History) -> Factors | None:
    """Apply the penalties in place: for repetition, then by frequency, then for presence."""
    factors = None
    if distribution.repetition_penalty != 1:
        factors = _repetition_factors(logits, distribution.repetition_penalty, history)
        factors.multiply(logits)
    if distribution.frequency_penalty or distribution.presence_penalty:
        ids, is_reply = history.reply()
        times = is_reply.to(logits.dtype)
        logits.scatter_add_(1, ids, times * -distribution.frequency_penalty)
        # Padding repeats a reply's first id, and `times` is 0 for empty replies.
        once = logits.gather(1, ids) - distribution.presence_penalty * times[:, :1]
        logits.scatter_(1, ids, once)
    return factors


def _repetition_factors(logits: Tensor, penalty: float, history: History) -> Factors:
    """Return the factors of all earlier tokens: 1 / penalty for logits above 0, else penalty."""
    ids = history.ids_so_far()
    above = logits.gather(1, ids) > 0
    values = torch.where(above, 1 / penalty, torch.tensor(penalty, dtype=logits.dtype))
    return Factors(ids, values)


def _forbid_tokens(logits: Tensor, distribution: Distribution, history: History) -> None:
    """Set the logits of tokens that the settings forbid to −∞, in place."""
    if distribution.grammar is not None:
        allowed = allowed_tokens(history.masks, logits.shape[-1], logits.device)
        logits.masked_fill_(~allowed, -math.inf)
    if distribution.allowed_token_ids:
        others = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
        others[list(distribution.allowed_token_ids)] = False
        logits.masked_fill_(others, -math.inf)
    for *begun, last in distribution.banned_ids:
        logits[:, last].masked_fill_(history.reply_ends_in(begun), -math.inf)
    if distribution.min_tokens and distribution.stop_token_ids:
        stops = list(distribution.stop_token_ids)
        too_early = history.sampled < distribution.min_tokens
        logits[:, stops] = logits[:, stops].masked_fill(too_early[:, None], -math.inf)


class Replayed(NamedTuple):
    """The results of `score_shaped` for M sampled tokens and R distributions.

    Shapes: `logprobs` (M,) in nats; `shares` (M,), 1 − q; `factors` (M,), f of the sampled tokens;
    `entropies` (R,) of the survivors; `weights` (R, V), p ∘ f.
    """

    logprobs: Tensor
    shares: Tensor
    factors: Tensor
    entropies: Tensor
    weights: Tensor


def score_shaped(shaped: Shaped, rows: Tensor, labels: Tensor) -> Replayed:
    """Return the results for shaped logits; their memory is reused for `weights`."""
    logits, sampled, factors = shaped
    normaliser = logits.logsumexp(-1)
    survives = logits[rows, labels] > -math.inf
    with_sampled = torch.where(
        survives, normaliser[rows], torch.logaddexp(normaliser[rows], sampled)
    )
    # If no token survives, p is 0 everywhere.
    least = torch.finfo(logits.dtype).min
    weights = logits.sub_(normaliser.clamp(min=least)[:, None]).exp_()
    entropies = torch.special.entr(weights).sum(-1)
    return Replayed(
        logprobs=sampled - with_sampled,
        shares=torch.where(survives, 1.0, (normaliser[rows] - with_sampled).exp()),
        factors=torch.ones_like(sampled) if factors is None else factors.at(rows, labels),
        entropies=entropies,
        weights=weights if factors is None else factors.multiply(weights),
    )


def score_for_autograd(
    logits: Tensor, distribution: Distribution, history: History, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies (S,) of tokens with logits (S, V), for autograd.

    The shaped values are computed outside the graph, and their derivative is added to it. This is
    the reference for `score_shaped`, which is faster and keeps no logits for autograd.
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


def drop_unlikely_tokens(logits: Tensor, distribution: Distribution) -> None:
    """Set the logits (R, V) of tokens that min-p, top-k and top-p drop to −∞, in place.

    They are applied in this order, as in vLLM, and each drops the logits below a threshold. Logits
    equal to it survive here. vLLM may drop some of these: with top-p, and on a GPU
    (`topk_topp_triton.py`) with top-k, too.
    """
    if distribution.min_p > 0:
        _drop_below(logits, logits.amax(-1, keepdim=True) + math.log(distribution.min_p))
    if 0 < distribution.top_k < logits.shape[-1]:
        _drop_below(logits, logits.topk(distribution.top_k).values[:, -1:])
    if distribution.top_p < 1:
        _drop_below(logits, _nucleus_floor(logits, distribution.top_p))


def _drop_below(logits: Tensor, floor: Tensor) -> None:
    logits.masked_fill_(logits < floor, -math.inf)


def _nucleus_floor(logits: Tensor, share: float) -> Tensor:
    """Return the smallest logit of each row's nucleus, (R, 1).

    A token is in the nucleus if the tokens above it together have less than `share` of the
    probability; the likeliest token always is.
    """
    normaliser, size = logits.logsumexp(-1, keepdim=True), logits.shape[-1]
    for count in sorted({min(NUCLEUS_CANDIDATES, size), size}):
        best = logits.topk(count).values
        shares = (best - normaliser).exp()
        sums = shares.cumsum(-1)
        inside = sums - shares < share
        inside[:, 0] = True
        if count == size or bool((sums[:, -1] >= share).all()):
            break
    return best.gather(1, inside.sum(-1, keepdim=True) - 1)
