"""What an update is made of, between its claim and its recording (pure)."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from store.claims import Claim, Outcome
from store.records import Record
from trainer.credit import TransitionCredit, assign_credit
from trainer.recipe import Recipe
from trainer.rows import Row, training_rows


class Plan(Record, frozen=True, kw_only=True):
    """A claim with its credit: what is trained, and what becomes of each episode."""

    credited: tuple[TransitionCredit, ...]
    rows: tuple[Row, ...]
    outcomes: tuple[Outcome, ...]
    metrics: dict[str, Any]


def plan_update(claim: Claim, recipe: Recipe, next_version: int) -> Plan:
    """Assign credit to a claim, and say what it comes to."""
    oldest = next_version - 1 - recipe.claim.max_staleness
    credited = assign_credit(claim.groups, recipe.credit, oldest_version=oldest)
    rows = training_rows(credited)
    outcomes = _outcomes(claim, credited)
    return Plan(
        credited=tuple(credited),
        rows=tuple(rows),
        outcomes=outcomes,
        metrics=_metrics(claim, credited, rows, outcomes, next_version),
    )


def _outcomes(claim: Claim, credited: Sequence[TransitionCredit]) -> tuple[Outcome, ...]:
    trained = {credit.episode_id for credit in credited if credit.reason is None}
    reasons = {credit.episode_id: credit.reason for credit in credited}
    return tuple(
        Outcome(
            episode_id=episode.id,
            trained=episode.id in trained,
            reason=None
            if episode.id in trained
            else reasons.get(episode.id) or "no_trainable_call",
        )
        for group in claim.groups
        for episode in group.episodes
    )


def _metrics(
    claim: Claim,
    credited: Sequence[TransitionCredit],
    rows: Sequence[Row],
    outcomes: Sequence[Outcome],
    next_version: int,
) -> dict[str, Any]:
    """Figures of an update, JSON-ready. Means are over episodes but for `staleness_mean`."""
    by_episode = {credit.episode_id: credit for credit in credited}
    scored = [credit for credit in by_episode.values() if credit.r_final is not None]
    dropped: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.reason is not None:
            dropped[outcome.reason] = dropped.get(outcome.reason, 0) + 1
    return {
        "groups": len(claim.groups),
        "episodes": len(outcomes),
        "trained_episodes": sum(outcome.trained for outcome in outcomes),
        "dropped": dropped,
        "reward_mean": _mean([credit.r_final for credit in scored]),
        "total_mean": _mean([credit.r_total for credit in scored]),
        "air_mean": _mean([credit.r_air for credit in by_episode.values()]),
        "staleness_mean": _mean([next_version - 1 - row.version for row in rows]),
        "tool_events": sum(len(credit.call.tool_events) for credit in credited),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None
