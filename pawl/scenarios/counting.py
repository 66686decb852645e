"""Say from what was counted how far a run is, and what came of it (pure)."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from msgspec import to_builtins

from pawl.scenarios.progress import Progress
from store.policy_table import PolicySpec
from store.read.evaluations import Evaluation
from store.read.stats import PolicyTotals, Totals
from store.records import Record, UpdateRow
from store.versions import PolicyVersion


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


class VersionRewards(Record, frozen=True, kw_only=True):
    """Hold what the episodes were worth that one version of a policy worked in.

    Of an episode with several versions the policy's first counts. Where several policies share an
    episode, they share its reward.

    Attributes:
        version: the version; 0 is the base model.
        reward: the mean reward of its episodes of work; None: none has one.
        episodes: number of these.
        held_out: the mean reward of its episodes of held-out tasks; None: none has one.
        held_out_episodes: number of these.
    """

    version: int
    reward: float | None = None
    episodes: int = 0
    held_out: float | None = None
    held_out_episodes: int = 0


def curves_of(
    policies: Sequence[str], worked: Sequence[Evaluation], asked: Sequence[Evaluation]
) -> dict[str, list[VersionRewards]]:
    """Return each policy's own curve, by version: its reward at work and on held-out tasks."""
    work = {(one.policy, one.version): one for one in worked}
    held_out = {(one.policy, one.version): one for one in asked}
    known = sorted({*work, *held_out})
    return {
        policy: [
            _version_rewards(version, work.get((name, version)), held_out.get((name, version)))
            for name, version in known
            if name == policy
        ]
        for policy in policies
    }


def _version_rewards(
    version: int, work: Evaluation | None, held_out: Evaluation | None
) -> VersionRewards:
    return VersionRewards(
        version=version,
        reward=_rounded(work),
        episodes=work.scored if work else 0,
        held_out=_rounded(held_out),
        held_out_episodes=held_out.scored if held_out else 0,
    )


def _rounded(point: Evaluation | None) -> float | None:
    return None if point is None or point.mean is None else round(point.mean, 4)


def outcome(progress: Progress, seconds: float) -> dict[str, Any]:
    """Return what came of a run: score before and after, and what that took."""
    return {
        "before": progress.before,
        "after": progress.after,
        "best": None if progress.best is None else progress.best.score,
        "largest_fall": largest_fall([one.score for one in progress.held_out]),
        "seconds": round(seconds, 1),
        "updates": len(progress.done_updates),
        "held_out": to_builtins(progress.held_out),
    }


def largest_fall(scores: Sequence[float]) -> float:
    """Return how far a score ever was below the best one before it; 0: never."""
    bests = accumulate(scores, max)
    return round(
        max((best - score for best, score in zip(bests, scores, strict=True)), default=0), 4
    )


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
