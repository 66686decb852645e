"""Warn where a policy's traffic and recipe do not fit: episodes that are never trained.

The trainer logs and counts these warnings, and `pawl policies show` prints them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy.ext.asyncio import AsyncConnection

from store.claim_query import ClaimRule, waiting_alone
from store.claims import last_updates
from trainer.credit.assign import LOW_REWARD, NOT_BEST

# `alone`: tasks come too rarely for a recipe of groups. `untrained`: many episodes are spent, and
# not trained. `no_signal`: one update after the other compares equal rewards.
TrainingWarning = Literal["alone", "untrained", "no_signal"]
# Updates that are looked at, and the share of their episodes that may be spent untrained.
LATEST: Final = 20
MOST_UNTRAINED: Final = 0.2
# Updates without a signal in a row, and the reasons of episodes that gave none.
WITHOUT_SIGNAL: Final = 3
NO_SIGNAL: Final = frozenset({LOW_REWARD, "no_spread"})
# Reasons that a recipe asks for, that an operator chose, or that `no_signal` is about.
EXPECTED: Final = NO_SIGNAL | {NOT_BEST, "rolled_back", "left_out"}
REMEDIES: Final[Mapping[str, str]] = {
    "alone": "name tasks that come again, or use the recipe `single`",
    "no_signal": "if nearly all episodes fail, begin with the recipe `sft`, or easier tasks; if"
    " nearly all succeed, give harder ones",
    "off_policy": "lower optimizer.learning_rate, or off_policy.min_effective_sample",
    "stale": "raise claim.max_staleness, or send rewards sooner",
    "too_long": "lower the model server's context; `pawl plan` says what fits",
    "no_trainable_call": "docs/explanation/trainable.md says which calls are trained",
    "unscored": "send rewards before claim.max_age_s has passed",
    "failed": "set credit.failed_reward",
}


class TrainingProblem(NamedTuple):
    """Say in words why episodes are not trained, and which recipe or setting to change."""

    why: str
    remedy: str

    def __str__(self) -> str:
        """Return both in a line."""
        return f"{self.why}: {self.remedy}"


async def training_warnings(
    connection: AsyncConnection, rule: ClaimRule
) -> dict[TrainingWarning, TrainingProblem]:
    """Return what is wrong by kind."""
    found = _of_updates(await last_updates(connection, rule.policy, LATEST))
    waiting, alone = await waiting_alone(connection, rule)
    # As many as an update takes: those of a slow wave may wait for the others of their group.
    if alone >= rule.groups * rule.group_size and 2 * alone > waiting:
        found["alone"] = TrainingProblem(
            f"{alone} of {waiting} episodes with a reward wait in vain for"
            f" {rule.smallest_group} of their task",
            REMEDIES["alone"],
        )
    return found


def _of_updates(
    latest: Sequence[tuple[bool, Mapping[str, Any]]],
) -> dict[TrainingWarning, TrainingProblem]:
    """Return what the latest updates say, newest first: of each if it only expired, and metrics."""
    found: dict[TrainingWarning, TrainingProblem] = {}
    spent, dropped = 0, Counter[str]()
    for _, metrics in latest:
        spent += metrics.get("episodes", 0)
        dropped.update(metrics.get("dropped", {}))
    unexpected = Counter({key: n for key, n in dropped.items() if key not in EXPECTED})
    if unexpected.total() > MOST_UNTRAINED * spent:
        [(reason, count)] = unexpected.most_common(1)
        remedy = REMEDIES.get(reason, "`pawl credit --update` explains each call's reason")
        found["untrained"] = TrainingProblem(
            f"{unexpected.total()} of the last {spent} episodes were spent untrained, {count} as"
            f" `{reason}`",
            remedy,
        )
    ends = [metrics for is_expiry, metrics in latest if not is_expiry][:WITHOUT_SIGNAL]
    if len(ends) == WITHOUT_SIGNAL and all(map(_had_no_signal, ends)):
        found["no_signal"] = TrainingProblem(
            f"the last {WITHOUT_SIGNAL} updates had no signal", REMEDIES["no_signal"]
        )
    return found


def _had_no_signal(metrics: Mapping[str, Any]) -> bool:
    """Return whether an update trained nothing, for the rewards of episodes that it could train.

    An imported version's update has no episodes, and others are about what cannot be trained.
    """
    return not metrics.get("trained_episodes") and not NO_SIGNAL.isdisjoint(
        metrics.get("dropped", {})
    )
