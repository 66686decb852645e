"""List the panels of what the trainer does: reward and learning, and versions."""

from typing import Final

from .kinds import OF_POLICY, Band, Query, Row, lines, newest, rate, rate_of_policy, stack, stairs

LEARNING: Final = Row(
    "Reward and learning",
    Band(
        8,
        lines(
            "Mean reward, by version",
            "Of the rewards stated on /feedback in the interval, by the version that earned them.",
            "short",
            Query(
                'sum by (policy, version) (delta(pawl_reward_stated_sum{policy=~"$policy"}[$__rate_interval])) / (sum by (policy, version) (increase(pawl_reward_count{policy=~"$policy"}[$__rate_interval])) > 0)',
                "{{policy}}@{{version}}",
            ),
            joined=True,
            min=None,
        ),
        lines(
            "Median reward, by version",
            "Interpolated within the histogram's buckets.",
            "none",
            Query(
                'histogram_quantile(0.5, sum by (policy, version, le) (rate(pawl_reward_bucket{policy=~"$policy"}[$__rate_interval])))',
                "{{policy}}@{{version}}",
            ),
            joined=True,
            min=None,
        ),
        stairs(
            "Reward of the updates",
            "Means over the episodes of the last update: final, total, and what automatic credit (AIR) adds.",
            "none",
            newest("pawl_update_reward_mean", "{{policy}} final"),
            newest("pawl_update_total_mean", "{{policy}} total"),
            newest("pawl_update_air_mean", "{{policy}} AIR"),
            min=None,
        ),
    ),
    Band(
        8,
        stairs(
            "Evaluation reward, by version",
            "Mean reward of the episodes of evaluation, with the limits of its 95 % interval.",
            "none",
            Query(
                'max by (policy, version, figure) (pawl_eval_reward{policy=~"$policy"})',
                "{{policy}}@{{version}} {{figure}}",
            ),
            min=None,
        ),
        stairs(
            "Episodes of evaluation",
            "By the version that worked on them. They are never trained on.",
            "none",
            Query(
                'max by (policy, version) (pawl_eval_episodes{policy=~"$policy"})',
                "{{policy}}@{{version}}",
            ),
            decimals=0,
        ),
    ),
    Band(
        7,
        stairs(
            "Judges: difference on their sentinels",
            "Scores of the same episodes now, less what they once were: mean, and mean size. A judge that drifts teaches the policy that it has drifted.",
            "none",
            Query(
                "max by (tenant, judge, figure) (pawl_sentinel_difference)",
                "{{tenant}} {{judge}} {{figure}}",
            ),
            min=None,
        ),
        stairs(
            "Judges: evidence of drift",
            "A judge that has not changed reaches c in at most one round of c. By default it counts as drifted from 10,000 on.",
            "none",
            Query("max by (tenant, judge) (pawl_sentinel_evidence)", "{{tenant}} {{judge}}"),
            Query(
                "max by (tenant, judge) (pawl_judge_drifted) > 0",
                "{{tenant}} {{judge}} HAS DRIFTED",
            ),
        ),
        stairs(
            "Judges: sentinels",
            "How many a judge has, and which share it could not score in its last round; how long ago that began, in days.",
            "none",
            Query("max by (tenant, judge) (pawl_sentinels)", "{{tenant}} {{judge}} sentinels"),
            Query(
                "max by (tenant, judge) (pawl_sentinel_unscored_share)",
                "{{tenant}} {{judge}} share not scored",
            ),
            Query(
                "(time() - max by (tenant, judge) (pawl_sentinel_round_begun)) / 86400",
                "{{tenant}} {{judge}} days ago",
            ),
        ),
    ),
    Band(
        7,
        stairs(
            "Staleness",
            "Mean of the last update's rows: versions between the one that sampled and the one being trained.",
            "suffix:versions",
            newest("pawl_update_staleness_mean"),
        ),
        stairs(
            "Entropy",
            "Of the last update. A fall to 0 is a policy that has stopped trying.",
            "suffix:nats/token",
            newest("pawl_update_entropy"),
        ),
        stairs(
            "Truncated ratios",
            "Share of the last update's tokens whose importance ratio was cut; PPO: whose ratio was clipped.",
            "percentunit",
            newest("pawl_update_ratio_cut_share"),
            newest("pawl_update_clip_share", "{{policy}}, clipped by PPO"),
        ),
        stairs(
            "Probe difference",
            "Mean |served − trainer| log-probability of the last version: is it served as it was trained?",
            "suffix:nats",
            newest("pawl_update_probe_difference"),
        ),
    ),
    Band(
        7,
        stairs("Gradient norm", "Of the last update.", "none", newest("pawl_update_grad_norm")),
        stack(
            "Tool events",
            "Tool executions by how they ended.",
            "suffix:events/s",
            rate("pawl_tool_events_total", "status"),
        ),
        lines(
            "Feedback",
            "Statements taken; pending ones wait for their target.",
            "suffix:statements/s",
            rate("pawl_feedback_total", "metric", "result"),
        ),
        lines(
            "Tokens trained",
            "Sampled tokens that carried loss.",
            "suffix:tokens/s",
            rate_of_policy("pawl_trained_tokens_total", "policy"),
        ),
    ),
    Band(
        7,
        stairs(
            "Drift and staleness",
            "Divergence of the policy in training from the one that sampled, nats a token: about one version it is arithmetic alone; older versions add to it.",
            "suffix:nats",
            newest("pawl_update_drift_kl", "{{policy}}: drift"),
            newest("pawl_update_staleness_kl", "{{policy}}: staleness"),
            min=None,
        ),
        stairs(
            "Drift, mean difference",
            "Mean |trainer − server| log-probability of tokens that the newest version sampled.",
            "suffix:nats",
            newest("pawl_update_drift_logp_mean_abs"),
        ),
        stairs(
            "Effective sample size",
            "What the last update's tokens are worth, as a share of as many from the policy itself.",
            "percentunit",
            newest("pawl_update_effective_sample_size"),
            newest(
                "pawl_update_smallest_effective_sample", "{{policy}}: an older version's, least"
            ),
            max=1,
        ),
        stairs(
            "Held or left",
            "1: the trainer claims nothing, for the reason that is named, or left the policy, because it failed. The log has it in full.",
            "none",
            newest("pawl_trainer_held", "{{policy}}: held"),
            Query(
                f"max by (policy, reason) (pawl_trainer_held_reason{OF_POLICY}) > 0",
                "{{policy}}: held, {{reason}}",
            ),
            newest("pawl_policy_left", "{{policy}}: left"),
            max=1,
        ),
        stairs(
            "KL to the base model",
            "How far the last update's version is from its base model, on what it was trained on: the further, the more of the rest it may have forgotten.",
            "suffix:nats",
            newest("pawl_update_kl_to_base"),
            newest("pawl_update_kl_penalised", "{{policy}}, as the penalty saw it"),
        ),
        stairs(
            "Masked calls",
            "Share of the last update's calls too far off the policy to carry loss.",
            "percentunit",
            newest("pawl_update_masked_share"),
        ),
        stairs(
            "Recomputed calls",
            "Calls of the last update whose log-probabilities the server did not give: the version that sampled them computed them.",
            "none",
            newest("pawl_update_recomputed_rows"),
        ),
    ),
)

VERSIONS: Final = Row(
    "Versions",
    Band(
        8,
        stairs(
            "Serving and trained",
            "The version that new episodes get, and the newest that was promoted. Apart after a roll-back.",
            "none",
            newest("pawl_serving_version", "{{policy}} serving"),
            newest("pawl_trained_version", "{{policy}} trained"),
            decimals=0,
        ),
        stairs(
            "Live versions and adapter slots",
            "Versions that may have traffic, of all policies of the model server. While all slots are taken, no update begins.",
            "none",
            newest("pawl_live_versions", "{{policy}} live"),
            newest("pawl_adapter_slots", "{{policy}} slots"),
            decimals=0,
        ),
        stairs(
            "Wait for even intervals",
            "Until the next version may be made, where more than half of the adapter slots are taken.",
            "s",
            newest("pawl_next_version_seconds", "{{policy}}"),
        ),
        stairs(
            "Adapters that replicas lack",
            "Servable versions that a model server does not have loaded, and how many servers answer.",
            "none",
            Query("max by (replica) (pawl_steward_missing_adapters)", "{{replica}} lacks"),
            Query("sum(max by (replica) (pawl_steward_replica_up))", "replicas that answer"),
            decimals=0,
        ),
        lines(
            "Trial: difference of rewards",
            "Bounds of the mean reward of the version that is tried, less that of the one that serves. It is promoted, or rolled back, by them.",
            "none",
            Query(
                'max by (policy, bound) (pawl_steward_gate_bound{policy=~"$policy"})',
                "{{policy}} {{bound}}",
            ),
        ),
        stairs(
            "Trial: episodes",
            "Episodes that the trial rests on, by arm.",
            "none",
            Query(
                'max by (policy, arm) (pawl_steward_gate_episodes{policy=~"$policy"})',
                "{{policy}} {{arm}}",
            ),
            decimals=0,
        ),
        stairs(
            "Moved by the gate",
            "Versions that got another state, by what they became, since the steward's start; policies whose traffic is frozen, that cannot be judged, or of which nothing is watched.",
            "none",
            Query(
                'sum by (policy, to) (pawl_steward_gate_moves_total{policy=~"$policy"})',
                "{{policy}} {{to}}",
            ),
            Query(
                'max by (policy) (pawl_steward_gate_frozen{policy=~"$policy"}) > 0',
                "{{policy}} is frozen",
            ),
            Query(
                'max by (policy) (pawl_steward_gate_failed{policy=~"$policy"}) > 0',
                "{{policy}} cannot be judged",
            ),
            Query(
                'max by (policy) (pawl_steward_gate_watched{policy=~"$policy"}) == 0',
                "{{policy}} is not watched",
            ),
            decimals=0,
        ),
        stairs(
            "Updates, by outcome",
            "Counted since the trainer's start.",
            "none",
            Query(
                'sum by (policy, outcome) (pawl_updates_total{policy=~"$policy"})',
                "{{policy}} {{outcome}}",
            ),
            decimals=0,
        ),
        lines(
            "Duration of an update",
            "Mean over the last hour: from a claim to the new version's promotion.",
            "s",
            Query(
                'sum by (policy) (increase(pawl_update_seconds_sum{policy=~"$policy"}[1h])) / (sum by (policy) (increase(pawl_update_seconds_count{policy=~"$policy"}[1h])) > 0)',
                "{{policy}}",
            ),
        ),
        stairs(
            "Episodes spent",
            "Trained, or why not; counted since the trainer's start.",
            "none",
            Query(
                'sum by (policy, reason) (pawl_episodes_consumed_total{policy=~"$policy"})',
                "{{policy}} {{reason}}",
            ),
            decimals=0,
        ),
    ),
)
