"""Define the trainer's Prometheus metrics, served at `/metrics`."""

from collections.abc import Mapping
from typing import Final, get_args

from prometheus_client import Counter, Gauge, Histogram

from store.metrics import begin_at_zero
from trainer.updates.circuit_breaker import PauseReason

UPDATES = Counter(
    "pawl_updates_total",
    "Updates: `trained`, `no_signal` (all advantages were 0), `released` (given back) or `rejected`"
    " (the controller rejected the version).",
    ["policy", "outcome"],
)
UPDATE_SECONDS = Histogram(
    "pawl_update_seconds",
    "Seconds from a claim to the record of the new version.",
    ["policy"],
    buckets=(1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280),
)
EPISODES = Counter(
    "pawl_episodes_consumed_total",
    "Episodes consumed: `trained`, or why not (as in `consumptions.reason`).",
    ["policy", "reason"],
)
LACKING_REWARD = Gauge(
    "pawl_lacking_episodes",
    "Episodes with feedback but without a reward, by reason.",
    ["policy", "reason"],
)
WARNING = Gauge(
    "pawl_training_warning",
    "1 while a policy's traffic and recipe do not fit, by reason: `untrained` (over 20 % of the"
    " last episodes), `no_signal` (three updates in a row), `collapsed` (answers narrow and"
    " rewards fall). `pawl policies show` says what to change.",
    ["policy", "reason"],
)
PAUSED = Gauge(
    "pawl_trainer_paused",
    "1 for the reason why the trainer of a policy claims nothing, else 0: its last updates failed,"
    " or a model server is away or at fault. Its log has the reason in full.",
    ["policy", "reason"],
)
# Description of each metric that an update records; a table's description covers its entries.
FIGURE_DESCRIPTIONS: Final[Mapping[str, str]] = {
    "groups": "Tasks in the claim",
    "episodes": "Episodes in the claim",
    "trained_episodes": "Episodes that carried loss",
    "dropped": "Episodes that were not trained, by reason",
    "corrections": "Corrections that were trained",
    "corrections_refused": "Corrections that were not trained, by reason",
    "signal_episodes": "Episodes that could teach something, members of groups in part",
    "earlier_members": "Episodes of earlier updates that groups were compared with",
    "families": "Final reward and episodes of each family of tasks",
    "reward_mean": "Mean final reward of the episodes",
    "reward_std": "Standard deviation of the episodes' final rewards",
    "air_mean": "Mean r_air of the episodes",
    "tool_events": "Tool events of the episodes",
    "staleness_mean": "Mean staleness, in versions, of the rows",
    "loss": "Mean loss of the optimiser steps",
    "grad_norm": "Gradient norm",
    "entropy": "Mean entropy, nats per token",
    "optimizer_steps": "Optimiser steps",
    "learning_rate": "Learning rate, times step_share",
    "step_share": "Share of a whole update's step: the root of its share of episodes",
    "step_kept": "Share of the step that the trust region left",
    "overlap": "Overlap of the policies before and after (1: the same)",
    "ratio_cut_share": "Share of tokens whose ratio was cut at off_policy.ratio_cap",
    "clip_share": "Share of tokens whose ratio was clipped",
    "masked_share": "Share of calls that are too far off the policy to carry loss",
    "effective_sample_size": "Effective sample size, as a share of the tokens",
    "smallest_effective_sample": "The smallest effective sample of an episode",
    "drift_kl": "Divergence of server and trainer about one version, nats per token",
    "drift_logp_mean_abs": "Mean |server − trainer| log-probability about one version",
    "staleness_kl": "Divergence of older versions from the one that was trained, nats per token",
    "kl_to_base": "KL of the trained policy to its base model on the update's training data, nats"
    " per token",
    "kl_tokens": "Tokens that kl_to_base was measured on",
    "teacher_kl": "KL of the policy, as it sampled, to its teacher, nats per token: their mean"
    " difference of log-probabilities",
    "rows": "Calls in training form",
    "recomputed_rows": "Rows whose sampling log-probabilities were computed again",
    "row_tokens": "Tokens of the rows",
    "sampled_tokens": "Tokens of the rows that the policy sampled",
    "computed_tokens": "Tokens that were computed: shared beginnings once",
    "tokens_per_second": "Distinct tokens trained per second of training",
    "mfu": "Share of the GPU's peak that the model's own operations came to (MFU)",
    "idle_share": "Share of the time since the update before in which the model computed nothing",
    "train_seconds": "Seconds of training",
    "seconds": "Seconds from the claim to the end",
    "manifest_sha256": "SHA-256 of the version's manifest",
}
UPDATE_GAUGES: Final = {
    name: Gauge(
        f"pawl_update_{name}", f"{FIGURE_DESCRIPTIONS[name]}, in the last update.", ["policy"]
    )
    for name in (
        *("reward_mean", "air_mean", "staleness_mean", "entropy", "masked_share"),
        *("effective_sample_size", "drift_kl", "kl_to_base", "grad_norm", "tokens_per_second"),
        *("mfu", "idle_share"),
    )
}
LEFT_POLICY = Gauge(
    "pawl_policy_left",
    "1 while the trainer does not work on a policy because it failed; else 0.",
    ["policy"],
)
LIVE_VERSIONS = Gauge(
    "pawl_live_versions",
    "Versions that have, or will have, an adapter slot of the policy's model server.",
    ["policy"],
)
ADAPTER_SLOTS = Gauge(
    "pawl_adapter_slots", "Adapter slots of the policy's model server, as far as known.", ["policy"]
)
LONGEST_CALL = Gauge(
    "pawl_longest_call_tokens",
    "Tokens of the longest call that fits into the trainer's memory; longer ones are not trained"
    " (`too_long`).",
)
TRAINED_VERSION = Gauge(
    "pawl_trained_version", "Newest version that was promoted, by whomever.", ["policy"]
)


def begin_policy(policy: str) -> None:
    """Set a policy's counters to 0, so that they are scraped before its first update."""
    outcomes = ("trained", "no_signal", "released", "rejected")
    of_policy = [[policy]]
    begin_at_zero(
        {
            UPDATES: [*of_policy, outcomes],
            UPDATE_SECONDS: of_policy,
            EPISODES: [*of_policy, ["trained"]],
        }
    )


def show_pause(policy: str, reason: PauseReason | None) -> None:
    """Set the gauge of paused policies: `reason` is why this policy pauses, None if it does not."""
    for each in get_args(PauseReason):
        PAUSED.labels(policy, each).set(each == reason)
