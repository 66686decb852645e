"""Make one reward of what was said: a weighted sum of named metrics (pure).

`store.read.rewards` does the same in SQL, for all that is stored.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from math import fsum
from typing import Final, Literal

import msgspec

from store.records import REWARD, Feedback, Record

# Values count up to ± this one, so that squares and sums of rewards stay finite.
LARGEST: Final = 1e100
NO_TEXTS: Final[Mapping[str, float]] = {}
NO_PARTS: Final[Mapping[str, float]] = {}
# Why something was said of an episode, or a call, and it has no reward all the same.
Lack = Literal["missing_metric", "undeclared_text"]


class RewardTerm(Record, frozen=True, kw_only=True):
    """Say what one metric counts for: `weight` times its value, clipped to `low` and `high`.

    `default` is the value where it was not stated; None: without it there is no reward. `texts`
    maps what may be stated in words to values.
    """

    metric: str
    weight: float = 1.0
    low: float = -LARGEST
    high: float = LARGEST
    default: float | None = None
    texts: Mapping[str, float] = NO_TEXTS

    def value_of(self, stated: float | str | None) -> float | None:
        """Return what a statement counts for, clipped; None if it counts for nothing."""
        value = self.texts.get(stated) if isinstance(stated, str) else stated
        return None if value is None else max(self.low, min(self.high, value))


class RewardRule(Record, frozen=True, kw_only=True):
    """Hold the terms whose sum is the reward, in the order in which they are added."""

    terms: tuple[RewardTerm, ...]

    @property
    def range(self) -> tuple[float, float]:
        """Return the lowest and the highest reward that the sum can come to."""
        ends = [sorted((term.weight * term.low, term.weight * term.high)) for term in self.terms]
        return fsum(low for low, _ in ends), fsum(high for _, high in ends)

    @property
    def digest(self) -> str:
        """Return what tells this rule from all others: rewards of two rules have two units."""
        return sha256(msgspec.json.encode([_as_read(term) for term in self.terms])).hexdigest()


def _as_read(term: RewardTerm) -> list[object]:
    """Return what a term says, alike for one of a recipe and one that a database returned."""
    texts = sorted((text, float(value)) for text, value in term.texts.items())
    default = None if term.default is None else float(term.default)
    return [term.metric, float(term.weight), float(term.low), float(term.high), default, texts]


# What is done where a recipe names no metric.
REWARD_ALONE: Final = RewardRule(terms=(RewardTerm(metric=REWARD),))


class Reward(Record, frozen=True, kw_only=True):
    """Hold the reward of an episode or call; `value` is None if nobody scored it.

    `parts` are what each metric adds to `value`; they are empty where that is no sum. `lacks` says
    why there is none although some of it was stated.
    """

    value: float | None = None
    parts: Mapping[str, float] = NO_PARTS
    lacks: Lack | None = None


UNSCORED: Final = Reward()


def newest(statements: Iterable[Feedback], metric: str) -> Feedback | None:
    """Return the statement of `metric` that counts, or None if there is none.

    It is the newest. Of several with the same time a withdrawal counts before a number, the lowest
    number before the others, and that before a text: the result must not depend on the order in
    which feedback arrived.
    """
    own = [item for item in statements if item.metric == metric]
    if not own:
        return None
    at = max(item.at for item in own)
    return min((item for item in own if item.at == at), key=_rank)


def _rank(item: Feedback) -> tuple[int, float, str]:
    if item.value is None:
        return 0, 0.0, ""
    return (2, 0.0, item.value) if isinstance(item.value, str) else (1, item.value, "")


def reward_of(statements: Iterable[Feedback], rule: RewardRule) -> Reward:
    """Return the reward that statements about one target come to.

    There is one if each metric without a default has a value, and any metric has one.
    """
    stated_all = list(statements)
    own = [newest(stated_all, term.metric) for term in rule.terms]
    stated = [
        None if one is None else term.value_of(one.value)
        for term, one in zip(rule.terms, own, strict=True)
    ]
    values = [
        term.default if value is None else value
        for term, value in zip(rule.terms, stated, strict=True)
    ]
    if all(value is None for value in stated) or any(value is None for value in values):
        return Reward(lacks=_lack(own, stated))
    parts = {
        term.metric: term.weight * value
        for term, value in zip(rule.terms, values, strict=True)
        if value is not None
    }
    return Reward(value=fsum(parts.values()), parts=parts if rule != REWARD_ALONE else NO_PARTS)


def _lack(own: Iterable[Feedback | None], stated: Iterable[float | None]) -> Lack | None:
    """Return why there is no reward; None where nothing that stands was said."""
    values = list(stated)
    for one, value in zip(own, values, strict=True):
        if one is not None and isinstance(one.value, str) and value is None:
            return "undeclared_text"
    return "missing_metric" if any(value is not None for value in values) else None
