"""Say from what was counted how far a run is, and what came of it (pure)."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import to_builtins

from pawl.scenarios.progress import Progress
from store.policy_table import PolicySpec
from store.read.stats import PolicyTotals, Totals
from store.records import PolicyVersion, UpdateRow


def serving_version(versions: Sequence[PolicyVersion], policy: str) -> int:
    """Return the version of a policy that serves; 0 is the base model."""
    serving = [one for one in versions if one.name == policy and one.state == "serving"]
    return max((one.version for one in serving), default=0)


def is_trained(
    updates: Sequence[UpdateRow],
    versions: Sequence[PolicyVersion],
    policies: Sequence[str],
    leading: str,
    number: int,
) -> bool:
    """Return whether `number` updates are done, none runs, and the newest versions serve.

    The updates are those of the leading policy: the others may learn less from a wave.
    """
    done = [update for update in updates if update.state == "done"]
    newest = {
        name: max((one.version or 0 for one in done if one.policy == name), default=0)
        for name in policies
    }
    return (
        sum(update.policy == leading for update in done) >= number
        and not any(update.state == "running" for update in updates)
        and all(serving_version(versions, name) >= newest[name] for name in policies)
    )


def outcome(progress: Progress, seconds: float) -> dict[str, Any]:
    """Return what came of a run: score before and after, and what that took."""
    return {
        "before": progress.before,
        "after": progress.after,
        "seconds": round(seconds, 1),
        "updates": len(progress.done_updates),
        "held_out": to_builtins(progress.held_out),
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
