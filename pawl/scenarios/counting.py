"""Put a run's summary together of what was counted (pure)."""

from collections.abc import Mapping, Sequence
from typing import Any

from pawl.scenarios.progress import Progress
from store.policy_table import PolicySpec
from store.read.stats import PolicyTotals, Totals


def outcome(progress: Progress, seconds: float) -> dict[str, Any]:
    """Return what came of a run: score before and after, and what that took."""
    return {
        "before": progress.before,
        "after": progress.after,
        "seconds": round(seconds, 1),
        "updates": len(progress.done_updates),
    }


def ledger_facts(counted: Totals) -> dict[str, int]:
    """Return what must be true of the ledger, in numbers."""
    return {
        "trained_episodes": counted.trained_episodes,
        "trained_unscored_episodes": counted.trained_unscored_episodes,
        "twice_consumed_episodes": counted.twice_consumed_episodes,
        "eval_episodes": counted.eval_episodes,
        "consumed_eval_episodes": counted.consumed_eval_episodes,
    }


def policy_facts(
    specs: Sequence[PolicySpec], counted: Sequence[PolicyTotals]
) -> dict[str, dict[str, Any]]:
    """Return of each policy whether it is trained, its versions, and the episodes behind them."""
    by_name: Mapping[str, PolicyTotals] = {one.policy: one for one in counted}
    facts = {}
    for spec in specs:
        one = by_name.get(spec.name)
        facts[spec.name] = {
            "trained": spec.trained,
            "versions": one.versions if one else 0,
            "trained_episodes": one.trained_episodes if one else 0,
        }
    return facts


def trainable_share(specs: Sequence[PolicySpec], counted: Sequence[PolicyTotals]) -> float | None:
    """Return which share of the trained policies' calls can be trained; None: there is no call.

    Calls of a policy that is not to be trained never can.
    """
    trained = {spec.name for spec in specs if spec.trained}
    ours = [one for one in counted if one.policy in trained]
    calls = sum(one.calls for one in ours)
    return round(sum(one.trainable_calls for one in ours) / calls, 4) if calls else None
