"""Warn if a policy's traffic and recipe do not fit: little is trained, or the policy gets worse.

The trainer logs and counts these warnings, and `pawl policies show` prints them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from math import fsum, inf
from statistics import fmean
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from store.claims import last_updates
from store.version_queries import why_held
from trainer.credit.assign import LOW_REWARD, NOT_BEST

# `untrained`: many episodes are consumed untrained. `no_signal`: several updates in a row compare
# only equal rewards. `collapsed`: answers become less varied (entropy falls), and rewards fall.
TrainingWarning = Literal["untrained", "no_signal", "collapsed"]
# How many of the latest updates the warning `untrained` is about.
RECENT_UPDATES: Final = 20
# The largest share of recent episodes that may be consumed untrained without a warning.
MOST_UNTRAINED: Final = 0.2
# Updates in a row without a signal before the warning `no_signal`.
UPDATES_WITHOUT_SIGNAL: Final = 3
# Reasons of untrained episodes by which an update counts as without a signal.
NO_SIGNAL: Final = frozenset({LOW_REWARD, "no_spread"})
# Reasons of untrained episodes that the warning `untrained` leaves out: the recipe or an operator
# wants them, or `no_signal` is about them.
EXPECTED_REASONS: Final = NO_SIGNAL | {NOT_BEST, "rolled_back", "left_out"}
MASKED: Final = "masked"
# A collapse is measured by means over windows of `WINDOW` updates, among the last `HISTORY`. In the
# newest window entropy is at most `ENTROPY_LEFT` times the highest before. The reward of all
# episodes, or of a family of tasks with `FEWEST_OF_FAMILY` episodes or more in a window, is more
# than `REWARD_FALL` standard deviations below its best before.
WINDOW: Final = 3
HISTORY: Final = 100
ENTROPY_LEFT: Final = 0.25
REWARD_FALL: Final = 0.5
FEWEST_OF_FAMILY: Final = 32
REMEDIES: Final[Mapping[str, str]] = {
    "no_signal": "if nearly all episodes fail, begin with the recipe `sft`, or easier tasks; if"
    " nearly all succeed, give harder ones",
    "off_policy": "lower optimizer.learning_rate, or off_policy.min_effective_sample",
    MASKED: "serve in the trainer's precision, lower optimizer.learning_rate, or widen"
    " off_policy.sequence_min and sequence_max",
    "stale": "raise claim.max_staleness, or send rewards sooner",
    "too_long": "lower the model server's context; `pawl plan` says what fits",
    "no_trainable_call": "docs/explanation/trainable.md says which calls are trained",
    "unscored": "send rewards before claim.max_age_s has passed",
    "failed": 'leave credit.failed_reward = "unscored" out',
}


class TrainingProblem(NamedTuple):
    """A problem of training in words: what is wrong, what to change, and since when."""

    why: str
    remedy: str
    since: datetime | None = None

    def __str__(self) -> str:
        """Return the problem, its beginning and the remedy, in one line."""
        since = f", since {self.since.astimezone():%Y-%m-%d %H:%M}" if self.since else ""
        return f"{self.why}{since}: {self.remedy}"


async def training_warnings(
    connection: AsyncConnection, policy: str
) -> dict[TrainingWarning, TrainingProblem]:
    """Return the policy's current warnings, by kind."""
    updates = await last_updates(connection, policy, HISTORY)
    warnings = _warnings_of_updates(updates[:RECENT_UPDATES])
    held = await why_held(connection, policy)
    worse = describe_collapse(updates) if held is None else (held, None)
    if worse is not None:
        why, since = worse
        remedy = f"`pawl policies rollback {policy}` goes back; then lower optimizer.learning_rate"
        warnings["collapsed"] = TrainingProblem(why, remedy, since)
    return warnings


def describe_collapse(updates: Sequence[Row[Any]]) -> tuple[str, datetime] | None:
    """Return how entropy and rewards fell, and since when, or None if not both did (pure).

    `updates` are ordered from newest to oldest. Falling entropy alone is no collapse: learning
    lowers it, too.
    """
    figures = ("entropy", "reward_mean", "reward_std")
    trained = [one for one in updates if None not in map(one.metrics.get, figures)]
    windows = [trained[n : n + WINDOW] for n in range(len(trained) - WINDOW + 1)]
    now, before = windows[:1], windows[WINDOW:]
    if not before:
        return None
    widest = max(_mean(window, "entropy") for window in before)
    entropy = _mean(now[0], "entropy")
    rewards = [_rewards(window) for window in before]
    falls, versions = [], []
    for family, least in _rewards(now[0]).items():
        most, place = max((means.get(family, -inf), -n) for n, means in enumerate(rewards))
        best = before[-place]
        if most - least > REWARD_FALL * _mean(best, "reward_std"):
            falls.append(f"{family or 'reward'} {most:.2g} → {least:.2g}")
            versions.append(best[0].parent_version)
    if entropy > ENTROPY_LEFT * widest or not falls:
        return None
    narrowed = f"answers narrowed, entropy {widest:.2g} → {entropy:.2g}"
    why = f"worse than version {versions[0]}: {narrowed}, {', '.join(falls)}"
    return why, now[0][-1].claimed_at


def _mean(window: Sequence[Row[Any]], figure: str) -> float:
    return fmean(one.metrics[figure] for one in window)


def _rewards(window: Sequence[Row[Any]]) -> dict[str, float]:
    """Return mean rewards over several updates: of all episodes (key "") and each large family."""
    by_family: dict[str, list[tuple[int, float]]] = {}
    for one in window:
        for family, own in one.metrics.get("families", {}).items():
            by_family.setdefault(family, []).append((own["episodes"], own["reward"]))
    means = {"": _mean(window, "reward_mean")}
    for family in sorted(filter(None, by_family)):
        episodes = sum(count for count, _ in by_family[family])
        if episodes >= FEWEST_OF_FAMILY:
            means[family] = fsum(count * reward for count, reward in by_family[family]) / episodes
    return means


def _warnings_of_updates(latest: Sequence[Row[Any]]) -> dict[TrainingWarning, TrainingProblem]:
    """Return the warnings `untrained` and `no_signal` from the latest updates, newest first."""
    warnings: dict[TrainingWarning, TrainingProblem] = {}
    spent, dropped = 0, Counter[str]()
    for metrics in (one.metrics for one in latest):
        spent += metrics.get("episodes", 0)
        dropped.update(metrics.get("dropped", {}))
        # Masked calls carry no loss. The share of masked calls is applied to the trained episodes.
        masked_share = metrics.get("masked_share") or 0.0
        dropped[MASKED] += round(masked_share * metrics.get("trained_episodes", 0))
    unexpected = Counter({key: n for key, n in dropped.items() if key not in EXPECTED_REASONS})
    if unexpected.total() > MOST_UNTRAINED * spent:
        [(reason, count)] = unexpected.most_common(1)
        remedy = REMEDIES.get(reason, "`pawl credit --update` explains each call's reason")
        warnings["untrained"] = TrainingProblem(
            f"{unexpected.total()} of the last {spent} episodes were spent untrained, {count} as"
            f" `{reason}`",
            remedy,
        )
    ends = [one.metrics for one in latest if one.state != "expired"][:UPDATES_WITHOUT_SIGNAL]
    if len(ends) == UPDATES_WITHOUT_SIGNAL and all(map(_had_no_signal, ends)):
        warnings["no_signal"] = TrainingProblem(
            f"the last {UPDATES_WITHOUT_SIGNAL} updates had no signal", REMEDIES["no_signal"]
        )
    return warnings


def _had_no_signal(metrics: Mapping[str, Any]) -> bool:
    """Return whether an update trained nothing because rewards gave no signal.

    Updates without episodes (imports), or with only untrainable episodes, return False.
    """
    return not metrics.get("trained_episodes") and not NO_SIGNAL.isdisjoint(
        metrics.get("dropped", {})
    )
