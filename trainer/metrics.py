"""Define the trainer's Prometheus metrics, served at `/metrics`."""

from typing import Final, get_args

from prometheus_client import Counter, Gauge, Histogram

from trainer.updates.holding import HoldReason

UPDATES = Counter(
    "pawl_updates_total",
    "Updates: `trained`, `no_signal` (all advantages were 0), `released` (given back), `rejected`"
    " (the version failed its probe) or `failed`.",
    ["policy", "outcome"],
)
UPDATE_SECONDS = Histogram(
    "pawl_update_seconds",
    "Seconds from a claim to the promotion of the new version.",
    ["policy"],
    buckets=(1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280),
)
EPISODES = Counter(
    "pawl_episodes_consumed_total",
    "Episodes consumed: `trained`, or why not (as in `consumptions.reason`).",
    ["policy", "reason"],
)
LACKING = Gauge(
    "pawl_lacking_episodes",
    "Episodes of which something was stated, and which have no reward all the same, by reason.",
    ["policy", "reason"],
)
HELD = Gauge(
    "pawl_trainer_held",
    "Whether the trainer claims nothing, because its last updates came to nothing or a model server"
    " is away or at fault.",
    ["policy"],
)
HELD_REASON = Gauge(
    "pawl_trainer_held_reason",
    "1 for what the trainer of a policy holds for, else 0; its log has it in full.",
    ["policy", "reason"],
)
TRAINED_TOKENS = Counter(
    "pawl_trained_tokens_total", "Sampled tokens that carried loss.", ["policy"]
)
UPDATE: Final = {
    name: Gauge(f"pawl_update_{name}", f"{description}, in the last update.", ["policy"])
    for name, description in {
        "reward_mean": "Mean final reward of the episodes",
        "total_mean": "Mean r_total (final and automatic) of the episodes",
        "air_mean": "Mean r_air of the episodes",
        "staleness_mean": "Mean staleness, in versions, of the rows",
        "entropy": "Mean entropy, nats per token",
        "ratio_cut_share": "Share of tokens whose ratio was truncated",
        "masked_share": "Share of calls that are too far off the policy to carry loss",
        "effective_sample_size": "Effective sample size, as a share of the tokens",
        "smallest_effective_sample": "Smallest effective sample size, as a share of its tokens, of"
        " an episode that an older version sampled",
        "recomputed_rows": "Calls whose log-probabilities the version that sampled them computed",
        "drift_kl": "Divergence of server and trainer about one version, nats per token",
        "drift_logp_mean_abs": "Mean |trainer − server| log-probability about one version",
        "staleness_kl": "Divergence that older versions add to the drift, nats per token",
        "clip_share": "Share of tokens whose ratio PPO clipped",
        "kl_to_base": "KL of the trained policy to its base model on what it was trained on, nats"
        " per token",
        "kl_penalised": "KL to the base model that the recipe's penalty saw, nats per token",
        "value_loss": "Critic's mean half squared error",
        "explained_variance": "Share of the returns' variance that the critic explained",
        "grad_norm": "Gradient norm",
        "probe_difference": "Mean |served − trainer| log-probability",
    }.items()
}
LEFT = Gauge(
    "pawl_policy_left",
    "1 while the trainer does not work on a policy because it failed; else 0.",
    ["policy"],
)
LIVE = Gauge(
    "pawl_live_versions",
    "Versions that need an adapter slot of the policy's model server, of all its policies.",
    ["policy"],
)
SLOTS = Gauge(
    "pawl_adapter_slots", "Adapter slots of the policy's model server, as far as known.", ["policy"]
)
NEXT_VERSION = Gauge(
    "pawl_next_version_seconds",
    "Seconds until even intervals allow the policy's next version: 0 where they do.",
    ["policy"],
)
VERSION = Gauge(
    "pawl_trained_version", "Newest version that was promoted, by whomever.", ["policy"]
)


def show_hold(policy: str, reason: HoldReason | None) -> None:
    """Show what the trainer of a policy holds for, or that it does not hold (None)."""
    HELD.labels(policy).set(reason is not None)
    for one in get_args(HoldReason):
        HELD_REASON.labels(policy, one).set(one == reason)
