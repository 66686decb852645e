"""Read the settings that shape the distribution of a sampled token, as vLLM does (pure).

vLLM changes a model's logits in this order before it samples (`vllm/v1/sample/sampler.py`): masks
of a grammar, `allowed_token_ids`, `bad_words` and `min_tokens`; `logit_bias`; the penalties for
repetition, frequency and presence; temperature; `min_p`, `top_k` and `top_p`. The proxy decides by
these settings whether a call can be trained on, and the trainer applies them to its own logits.

vLLM raises temperatures between 0 and `LEAST_TEMPERATURE` to the latter
(`SamplingParams.__post_init__` in `vllm/sampling_params.py`); 0 is greedy. The proxy records
temperatures by this rule. The trainer applies it again on reading, because a ledger may hold
temperatures that an earlier Pawl recorded as they were sent.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from store.records import Record
from store.values.grammars import GRAMMAR, Grammar, read_grammar

LEAST_TEMPERATURE: Final = 0.01
# Only plain numbers, which Python's `float` and vLLM read alike.
_NUMBER: Final = re.compile(r"[ \t\r\n]*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?[ \t\r\n]*", re.ASCII)


def number_of(value: object) -> float | None:
    """Return a setting as the finite number that vLLM reads it as, or None if it is not one.

    vLLM's request classes use pydantic's lax mode: a string that holds a number is that number,
    true is 1 and false is 0.
    """
    if isinstance(value, str):
        return _finite(value) if _NUMBER.fullmatch(value) else None
    return _finite(value) if isinstance(value, int | float) else None


def _finite(value: str | float) -> float | None:
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def used_temperature(requested: object) -> float | None:
    """Return the temperature that vLLM uses for `requested`, or None if no server accepts it."""
    number = number_of(requested)
    if number is None or number < 0:
        return None
    return max(number, LEAST_TEMPERATURE) if number else 0.0


# vLLM's own limits on a bias (`SamplingParams.from_optional`).
MOST_BIAS: Final = 100.0
# The largest count (`top_k`, `min_tokens`) that vLLM can hold, in an int32.
LARGEST_COUNT: Final = 2**31 - 1
_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


class Distribution(Record, frozen=True, kw_only=True):
    """The settings that one call's tokens were sampled with; hashable.

    A setting without effect has its default. `banned_ids` are the token ids of `bad_words`, and
    `stop_token_ids` matter only with `min_tokens` or a grammar: both are complete only in the
    trainer, which has the tokenizer.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Empty: all are allowed.
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    banned_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether every token is sampled from the full softmax at the temperature."""
        return self == Distribution(temperature=self.temperature)

    @property
    def needs_history(self) -> bool:
        """Return whether a token's distribution depends on which tokens the call had before it."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0)
        looks_back = bool(self.bad_words) or self.grammar is not None
        return any(penalties) or looks_back or self.min_tokens > 0

    @property
    def token_ids(self) -> frozenset[int]:
        """Return all token ids that the settings name."""
        biased = (token for token, _ in self.logit_bias)
        banned = (token for ids in self.banned_ids for token in ids)
        return frozenset((*biased, *banned, *self.allowed_token_ids, *self.stop_token_ids))


def _number(least: float, most: float) -> Callable[[Any], float | None]:
    def read(value: Any) -> float | None:
        number = number_of(value)
        return number if number is not None and least <= number <= most else None

    return read


def _count(least: int) -> Callable[[Any], int | None]:
    def read(value: Any) -> int | None:
        number = number_of(value)
        is_count = number is not None and number.is_integer() and least <= number <= LARGEST_COUNT
        return int(number) if number is not None and is_count else None

    return read


def _temperature(value: Any) -> float | None:
    # 0 is greedy: nothing is sampled.
    return used_temperature(value) or None


def _above_zero(value: Any) -> float | None:
    number = number_of(value)
    return number if number is not None and number > 0 else None


def _top_p(value: Any) -> float | None:
    number = _above_zero(value)
    return number if number is not None and number <= 1 else None


def _top_k(value: Any) -> int | None:
    count = _count(-1)(value)
    return None if count is None else max(count, 0)


def _bias(value: Any) -> tuple[tuple[int, float], ...] | None:
    if not isinstance(value, dict):
        return None
    pairs = []
    for token, bias in value.items():
        number = number_of(bias)
        # vLLM accepts other spellings of a number, too, so that two keys may name one token.
        if number is None or not _ID.fullmatch(token):
            return None
        pairs.append((int(token), min(MOST_BIAS, max(-MOST_BIAS, number))))
    return tuple(sorted((token, bias) for token, bias in pairs if bias))


def _ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        return None
    return tuple(sorted(set(value)))


def _some_ids(value: Any) -> tuple[int, ...] | None:
    return _ids(value) or None


def _words(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        return None
    return tuple(sorted(set(value)))


# Readers of all settings but the temperature, which every call has.
_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "top_p": _top_p,
    "top_k": _top_k,
    "min_p": _number(0.0, 1.0),
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _above_zero,
    "logit_bias": _bias,
    "allowed_token_ids": _some_ids,
    "bad_words": _words,
    "min_tokens": _count(0),
}
# The settings that are replayed, by the names that requests have for them.
REPLAYED: Final = frozenset({"temperature", *_READERS, "stop_token_ids"})
# The settings that a model server may have defaults for (vLLM's `get_diff_sampling_param`).
WITH_DEFAULTS: Final = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def distribution_of(settings: Mapping[str, Any]) -> Distribution:
    """Return the distribution of recorded settings; settings that do not shape it are ignored.

    Raises:
        ValueError: a setting has a value that no server samples with; the message names it.
    """
    shaping = {"temperature": _read("temperature", settings.get("temperature"), _temperature)}
    for name, read in _READERS.items():
        if name in settings and settings[name] is not None:
            shaping[name] = _read(name, settings[name], read)
    if GRAMMAR in settings and settings[GRAMMAR] is not None:
        shaping[GRAMMAR] = _read(GRAMMAR, settings[GRAMMAR], read_grammar)
    # Without `min_tokens` or a grammar, a stop token only ends the reply.
    masks_stop_tokens = shaping.get("min_tokens") or GRAMMAR in shaping
    if masks_stop_tokens and settings.get("stop_token_ids") is not None:
        shaping["stop_token_ids"] = _read("stop_token_ids", settings["stop_token_ids"], _ids)
    return Distribution(**shaping)


def parse_server_defaults(values: Mapping[str, Any]) -> dict[str, float]:
    """Return a model server's default sampling settings as numbers.

    Raises:
        ValueError: a setting cannot have a server's default, or its value is invalid.
    """
    for name in values:
        if name not in WITH_DEFAULTS:
            raise ValueError(f"unknown setting {name!r:.80}; known: {', '.join(WITH_DEFAULTS)}")
    # A server may be greedy by default: a temperature of 0 is valid here.
    read = {n: used_temperature if n == "temperature" else _READERS[n] for n in values}
    return {name: _read(name, values[name], read[name]) for name in values}


def _read(name: str, value: Any, read: Callable[[Any], Any]) -> Any:
    parsed = read(value)
    if parsed is None:
        raise ValueError(f"{name} = {value!r:.80} is not a valid sampling setting")
    return parsed
