"""Compute what the trials came to, and the bars they are held against (pure)."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from math import sqrt
from statistics import fmean, pvariance
from typing import Final

from benchmarks.gate.runs import horizon
from benchmarks.proxy.figures import Bar
from benchmarks.proxy.tables import Rows, number
from benchmarks.trials.ledger import Begun
from benchmarks.trials.turning import Turned
from pawl.steward.gate.records import GateOptions
from store.records import Record
from store.versions import PolicyEvent, PolicyState

RANDOM, INVERTED, GOOD = "random", "inverted rewards", "good"
# A proxy reads the policies twice a second; so long after a version lost its share none begins.
KNOWN: Final = timedelta(seconds=5.0)
# What turned bad is rolled back so long after there is enough evidence for it.
IN_TIME_S: Final = 60.0
# How many standard errors a share or a mean may be away from what it should be.
ERRORS: Final = 3.0


class Mean(Record, frozen=True, kw_only=True):
    """Hold the mean of so many rewards, and its standard error."""

    scored: int
    mean: float
    error: float


class Trial(Record, frozen=True, kw_only=True):
    """Hold what came of one adapter.

    Attributes:
        name: which adapter it was.
        ended: the state that it ended in.
        reason: why, as its last event says.
        seconds: from its import to that state.
        episodes: those that began while it had a share.
        canary: how many of them it got.
        afterwards: how many it got once it had lost that share.
        own: their rewards; None without any.
        others: the rewards of what served, in that time.
        before: the rewards of what served, before any trial.
        fixed: the episodes that a test with one look at its end needs for the same difference, if
            it knows that beforehand.
    """

    name: str
    ended: PolicyState
    reason: str
    seconds: float
    episodes: int
    canary: int
    afterwards: int
    own: Mean | None
    others: Mean | None
    before: Mean | None
    fixed: float | None


def trial_of(
    name: str,
    version: int,
    told: Sequence[PolicyEvent],
    begun: Sequence[Begun],
    first: datetime,
    options: GateOptions,
) -> Trial:
    """Return what came of the version; `told` are its events, oldest first.

    `begun` are all episodes, and `first` is when the first version of all was given some.
    """
    last = told[-1]
    since = next((one.at for one in told if one.to_state == "canary"), None)
    during = [one for one in begun if since is not None and since <= one.at < last.at]
    of_it = [one for one in during if (one.arm, one.version) == ("canary", version)]
    own, others = mean(of_it), mean([one for one in during if one.version != version])
    lost = last.at + KNOWN
    return Trial(
        name=name,
        ended=last.to_state,
        reason=last.reason,
        seconds=(last.at - told[0].at).total_seconds(),
        episodes=len(during),
        canary=len(of_it),
        afterwards=sum(
            one.arm == "canary" and one.version == version for one in begun if one.at >= lost
        ),
        own=own,
        others=others,
        before=mean([one for one in begun if one.at < first]),
        fixed=_fixed(own, others, options),
    )


def mean(begun: Sequence[Begun]) -> Mean | None:
    """Return the mean reward of the episodes that have one, or None if fewer than two have."""
    values = [one.reward for one in begun if one.reward is not None]
    if len(values) < 2:
        return None
    error = sqrt(pvariance(values) / len(values))
    return Mean(scored=len(values), mean=fmean(values), error=error)


def _fixed(own: Mean | None, others: Mean | None, options: GateOptions) -> float | None:
    """Return the episodes of a test with one look, by the variances and the difference seen."""
    if own is None or others is None:
        return None
    effect, share = own.mean - others.mean, options.canary_share
    each = [one.error**2 * one.scored for one in (own, others)]
    return horizon(each[0] / share + each[1] / (1 - share), effect, options)


def bars(trials: Sequence[Trial], options: GateOptions) -> list[Bar]:
    """Return what is promised of each adapter."""
    by_name = {one.name: one for one in trials}
    bad, worse, good = (by_name.get(name) for name in (RANDOM, INVERTED, GOOD))
    found = []
    if bad is not None:
        found.append(Bar("random: episodes that it got", bad.canary + bad.afterwards, 0))
        found.append(_ends(bad, "rejected"))
    if worse is not None:
        share = options.canary_share
        error = ERRORS * sqrt(share * (1 - share) / max(worse.episodes, 1))
        of_all = worse.canary / worse.episodes if worse.episodes else None
        found.append(Bar("inverted: share of the new episodes", of_all, share + error))
        found.append(_ends(worse, "rolled_back"))
        found.append(Bar("inverted: episodes after that", worse.afterwards, 0))
        found.append(Bar("inverted: others' rewards, standard errors lower", lower(worse), ERRORS))
    if good is not None:
        found.append(_ends(good, "serving"))
    return found


def turned_bars(turned: Turned | None) -> list[Bar]:
    """Return what is promised of a version that turns bad while it serves."""
    waited = turned.waited if turned is not None else None
    return [Bar("turned bad: s to its roll-back once the evidence sufficed", waited, IN_TIME_S)]


def _ends(trial: Trial, state: PolicyState) -> Bar:
    return Bar(f"{trial.name}: ends as {state}", float(trial.ended == state), 1, at_least=True)


def lower(trial: Trial) -> float | None:
    """Return how many standard errors the others' rewards are below those before any trial."""
    before, beside = trial.before, trial.others
    if before is None or beside is None:
        return None
    return (before.mean - beside.mean) / (sqrt(before.error**2 + beside.error**2) or 1.0)


def table(trials: Sequence[Trial]) -> Rows:
    """Return a line for each adapter."""
    heads = ["adapter", "ended as", "seconds", "episodes", "of them its own", "its reward"]
    heads += ["others' reward", "before", "fixed horizon"]
    lines = [
        [
            one.name,
            one.ended,
            number(one.seconds),
            number(one.episodes),
            number(one.canary),
            *(_shown(rewards) for rewards in (one.own, one.others, one.before)),
            number(one.fixed),
        ]
        for one in trials
    ]
    notes = [f"{one.name}: {one.reason}" for one in trials]
    notes.append(
        "*Fixed horizon*: episodes that a test with one look, at its end, needs for the difference"
        " that was seen; it must know that beforehand."
    )
    return Rows("Trials", heads, lines, notes)


def _shown(rewards: Mean | None) -> str:
    return "–" if rewards is None else f"{rewards.mean:.3f} ± {rewards.error:.3f}"


def turned_table(turned: Turned | None) -> Rows:
    """Return a line for the version that turned bad as it served."""
    heads = ["turned bad", "rolled back after s", "of these, evidence sufficed", "its episodes"]
    heads += ["their reward", "the base model's", "its reward before", "serves now"]
    if turned is None:
        return Rows("Turned bad", heads, [], ["The good adapter was not promoted."])
    line = [
        GOOD,
        number(turned.seconds),
        number(turned.waited, 1),
        number(turned.episodes),
        *(number(one, 3) for one in (turned.own, turned.base, turned.before)),
        turned.serves,
    ]
    return Rows("Turned bad", heads, [line], [turned.reason])
