"""Tell whether a judge scores the same episodes as it once did (pure).

If a judge has not changed, the scores that it gave one sentinel, at whatever times, are as good in
any other order. So which of them are the newest is a matter of chance, and each choice of as many
is as likely. Let x be what speaks for a drift in a choice, and x* that of the newest scores; then

    E = Π exp(λ·x*) / mean over all choices of exp(λ·x),   a product over the sentinels,

has a mean of 1, whatever the distribution of scores, also where the references are themselves
single draws of a noisy judge. By Markov's inequality a judge that has not changed reaches E ≥ c
with a probability of at most 1/c, at each look: however often somebody looks, at most one look of c
is wrong on average. An average of such products over λ, over what speaks for a drift, and over how
many scores are the newest, is one as well.

The product has a mean of 1 only if sentinels are independent given their scores. A judge whose
noise is shared by all that it scores in one round (a backend, a sample of examples drawn once a
day) is not: all its sentinels move together, and it is reported as a drift far more often.

See Koning, "Post-hoc and anytime valid permutation and
group invariance testing", arXiv:2310.01153, 2023, and Ramdas & Wang, "Hypothesis testing with
e-values", 2024.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, count
from math import exp, fsum, log
from typing import Final, NamedTuple

from store.records import Record

# How strongly a choice's difference counts, as a share of the largest of any choice.
TILTS: Final = (0.25, 1.0, 4.0, 16.0)
# What speaks for a drift: higher scores, lower ones, or other ones in either direction.
SIGNS: Final[tuple[Callable[[float], float], ...]] = (
    lambda difference: difference,
    lambda difference: -difference,
    abs,
)
# Evidence past this is told as this, so that no float overflows.
MOST_EVIDENCE: Final = 1e200
# Scores of a sentinel that are no further apart count as equal: this, or so large a share of the
# largest, if that is above 1. What rounding makes of one score at two times is no change.
LEAST: Final = 1e-6
# With as many new scores there are 70 choices for each sentinel.
MOST_REFERENCES: Final = 4


class Scores(NamedTuple):
    """Hold what one sentinel was scored: its references, and the newest scores, oldest first."""

    references: Sequence[float]
    newest: Sequence[float]


class Drift(Record, frozen=True, kw_only=True):
    """Describe how a judge scores its sentinels now, against their references.

    Attributes:
        compared: sentinels with a reference and a score of this round; without any, the rest says
            nothing.
        mean: mean difference of the newest score from the mean of the references.
        mean_absolute: mean size of that difference. A noisy judge has some without any drift.
        evidence: a judge that has not changed reaches any c with a probability of at most 1/c.
    """

    compared: int
    mean: float
    mean_absolute: float
    evidence: float


def drift(sentinels: Iterable[Scores]) -> Drift:
    """Return the drift of a judge, of sentinels with at least one reference and one new score."""
    compared = [_without_rounding(one) for one in sentinels]
    # Each reference is taken from the score, so that equal ones differ by exactly 0.
    differences = [
        fsum([one.newest[-1] - each for each in one.references]) / len(one.references)
        for one in compared
    ]
    number = max(len(compared), 1)
    return Drift(
        compared=len(compared),
        mean=fsum(differences) / number,
        mean_absolute=fsum(map(abs, differences)) / number,
        evidence=_evidence(compared),
    )


def can_show(sentinels: Iterable[Scores], evidence: float) -> bool:
    """Return whether as many scores of as many sentinels could reach `evidence` at all.

    The largest evidence is had if each one's newest scores all lie above its references.
    """
    most = [Scores([0.0] * len(one.references), [1.0] * len(one.newest)) for one in sentinels]
    return _evidence(most) >= evidence


def fewest(references: int, evidence: float) -> int:
    """Return how many sentinels must change at least so that `evidence` can be reached at all."""
    one = Scores([0.0] * references, [1.0] * references)
    return next(number for number in count(1) if can_show([one] * number, evidence))


def _without_rounding(one: Scores) -> Scores:
    """Return a sentinel's scores, or equal ones if they are apart by rounding at most.

    It is decided by all of its scores, whatever their order: they stay exchangeable.
    """
    scores = [*one.references, *one.newest]
    if max(scores) - min(scores) > LEAST * max(1.0, *map(abs, scores)):
        return one
    return Scores([scores[0]] * len(one.references), [scores[0]] * len(one.newest))


def _evidence(sentinels: Sequence[Scores]) -> float:
    ways: list[float] = []
    # The newest score alone tells soon, as many as there are references tell of small drifts.
    for window in (1, MOST_REFERENCES):
        choices = [_choices(one, window) for one in sentinels]
        for sign in SIGNS:
            valued = [[sign(one) for one in each] for each in choices]
            ways += [fsum([_log_bet(each, tilt) for each in valued]) for tilt in TILTS]
    most = max(ways)
    # Sums of thousands of sentinels are outside what a float holds, their logarithms are not.
    evidence = most + log(fsum([exp(one - most) for one in ways]) / len(ways))
    return exp(max(min(evidence, log(MOST_EVIDENCE)), -log(MOST_EVIDENCE)))


def _choices(one: Scores, window: int) -> list[float]:
    """Return how much larger the mean of a choice is than that of the rest, for each choice.

    The first choice is the newest scores, at most `window` and as many as there are references.
    The largest difference is 1, or all are 0: what a sentinel counts does not depend on its noise.
    """
    newest = one.newest[-min(window, len(one.references)) :]
    scores = [*newest, *one.references]
    total, chosen, rest = fsum(scores), len(newest), len(one.references)
    sums = [fsum(some) for some in combinations(scores, chosen)]
    differences = [some / chosen - (total - some) / rest for some in sums]
    most = max(map(abs, differences))
    # What sums make of equal scores is no difference.
    if max(scores) == min(scores) or most == 0:
        return [0.0 for _ in differences]
    return [one / most for one in differences]


def _log_bet(choices: Sequence[float], tilt: float) -> float:
    """Return the logarithm of one sentinel's factor: 0 on average over the choices, or less."""
    most = max(choices)
    mean = fsum([exp(tilt * (one - most)) for one in choices]) / len(choices)
    return tilt * (choices[0] - most) - log(mean)
