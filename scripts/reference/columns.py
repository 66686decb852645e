"""Explain each table and column of the database.

A column with `doc=` or `comment=` in `store.schema` needs no entry here, and its own text
counts.
"""

from typing import Final, get_args

from proxy.calls.trainable import Reason

TABLES: Final = {
    "episodes": "One row per episode key. Parts that turned out to be one episode point to its "
    "root; each keeps its own values, so that the join can be undone.",
    "transitions": "One row per call: request, reply, token ids, log-probabilities and timing. "
    "Partitioned by day through the time in its UUIDv7 id.",
    "provided_fingerprints": "Fingerprints of what later calls may repeat of a call, such as "
    "the id of a tool call that it handed out.",
    "needed_fingerprints": "Fingerprints of what a call repeats of earlier calls, where its "
    "proxy could not join it to an episode.",
    "deleted_names": "Tombstones: names of deleted episodes, calls and responses, of which nothing "
    "is stored again.",
    "dropped_days": "Days of calls that were dropped after `PAWL_KEEP_DAYS`; no call of them, or "
    "of a day before, is stored any more.",
    "outdated_days": "The last day of each tenant of which records were removed after "
    "`PAWL_KEEP_DAYS`; no call of the tenant from it, or from a day before, is stored any more.",
    "links": "Matches of needed and provided fingerprints. Which episodes are one is computed "
    "from these rows.",
    "tool_events": "How tool executions ended.",
    "feedback": "Statements about episodes and calls, append-only. The newest statement of a "
    "metric about a target counts.",
    "feedback_requests": "One row per stored POST to `/feedback`.",
    "feedback_keys": "Idempotency keys in use, maybe for bodies that are not stored yet. Kept for "
    "a day.",
    "policies": "One row per policy version; a version never changes. Version 0 is the base model.",
    "policy_events": "Changes of versions' states, with reasons. Rows are only added: a trigger "
    "refuses to change or delete one. None is of a time before there was this table.",
    "updates": "One row per training update. At most one per policy is running.",
    "episode_policies": "What each policy may claim of an episode: a row for each policy that "
    "served a call of it, or of its parts.",
    "reward_terms": "What a policy's reward is the sum of, as its recipe's `[reward]` says. A "
    "policy without a row has the metric `reward`.",
    "consumptions": "Episodes that an update has spent, trained or not. A policy spends an episode "
    "at most once.",
    "fault_times": "Times in which a policy's model server sampled wrongly. Episodes with a call "
    "in one are set aside: no update claims them, and they expire as others do.",
    "lapses": "Times in which a worker lost records and could not say of which episodes. Episodes "
    "that were under way in one are set aside, whenever their calls are stored.",
    "judgements": "What `pawl judge` has asked, and what came of it.",
    "sentinels": "Episodes that a judge scores again and again. Nothing about them is a reward.",
    "sentinel_scores": "What a judge said of its sentinels, a row for each round: those that are "
    "compared, and the last. Deleted with the sentinel.",
    "sentinel_rounds": "What each scoring of a judge's sentinels came to. Rows stay when an "
    "episode is deleted: they are figures of all.",
    "api_keys": "API keys: their hashes, and what each may do. A revoked key keeps its row.",
}
REASONS: Final = ", ".join(f"`{reason}`" for reason in get_args(Reason))
EPISODES: Final = {
    "id": "Id.",
    "key": "The episode's name: as the client gave it, with its namespace, or the first call's id. "
    "Names of tenants other than the default one begin with the tenant and U+001F, here and in "
    "`task`, `response_id`, `target` and `idempotency_key`.",
    "method": "How the first call was assigned to this episode, such as `header` or `own`.",
    "task": "Task that its calls name, or one derived from its first call.",
    "task_named": "Whether a client named the task.",
    "task_from": "The call that the task comes from.",
    "policy": "Policy that served its first call.",
    "policy_version": "Policy version that served its first call.",
    "api_key": "Id of the API key that its first call came with; null: let in without one.",
    "first_call_id": "First call.",
    "last_call_id": "Last call so far.",
    "last_call_at": "Time of the last call.",
    "failed": "Whether the last call was refused for what it says (HTTP 400, 413, 422).",
    "scored_at": "Time of the first reward about the episode.",
    "call_scored_at": "Time of the newest reward about a single one of its calls.",
    "reward": "Newest reward about the episode, of equally new ones the lowest; null: none, or it "
    "was withdrawn.",
    "doubtful": "Whether a call was assigned to it in doubt.",
    "linked": "Whether it takes part in a join with other episodes.",
    "root": "Episode that this one is a part of; null: it stands for itself.",
    "joined_task": "Task of the whole episode, if one of its other parts names it.",
    "split": "`eval` if any of its own calls says so, else `train`. Evaluation is never claimed.",
    "joined_split": "`eval` if it is joined with an episode of evaluation, or is one itself.",
    "quarantined_reason": "Why the episode is never claimed; null: it may be.",
    "deleted_at": "Time it was deleted; null: it is there. Of a deleted one only ids and times are "
    "left, and `key` is the digest of its name.",
}
TRANSITIONS: Final = {
    "episode_id": "Episode (the part of it that has the call's own key).",
    "parent_id": "Earlier call of the episode that `request` and `prompt_ids` only add to.",
    "request_prefix": "Bytes that the request shares with the parent's at its beginning.",
    "request_suffix": "Bytes that the request shares with the parent's at its end.",
    "prompt_prefix": "Bytes of `prompt_ids` shared with the parent's prompt and sampled ids.",
    "request": "Request body as the client sent it (JSON); with a parent, the bytes it adds.",
    "prompt_ids": "Prompt's token ids, little-endian int32; with a parent, those it adds.",
    "sampled_ids": "Sampled token ids, little-endian int32.",
    "sampled_logprobs": "Log-probability of each sampled token in nats, little-endian float32; "
    "empty: the server gave none, and the trainer computes them.",
    "reason": f"Why it cannot carry loss; null: it can. One of {REASONS}.",
}
JOINS: Final = {
    "provided_fingerprints.digest": "Fingerprint, 16 bytes.",
    "provided_fingerprints.episode_id": "Episode that provides it.",
    "needed_fingerprints.digest": "Fingerprint, 16 bytes.",
    "needed_fingerprints.call_id": "Call that needs it.",
    "needed_fingerprints.episode_id": "Episode of that call.",
    "needed_fingerprints.level": "How sure a fingerprint it is, 0 the surest; of a call, only "
    "the lowest level with a match counts.",
    "deleted_names.digest": "First 16 bytes of the SHA-256 of the kind and the name.",
    "deleted_names.deletion": "Number of the deletion, in the order of deletions.",
    "deleted_names.at": "Time of the deletion.",
    "dropped_days.day": "Day (UTC).",
    "dropped_days.calls": "How many calls it had.",
    "dropped_days.at": "Time it was dropped.",
    "outdated_days.tenant": "Tenant.",
    "outdated_days.day": "Day (UTC).",
    "links.call_id": "Call that needs a fingerprint.",
    "links.level": "As in `needed_fingerprints`.",
    "links.provided_by": "Episode that provides the fingerprint.",
    "links.needed_by": "Episode of the call that needs it.",
    "links.too_common": "Whether too many episodes provide it to tell them apart; it then joins "
    "nothing.",
}
FEEDBACK: Final = {
    "tool_events.id": "Id.",
    "tool_events.episode_id": "Episode; null until the target is known.",
    "tool_events.asked_by": "Call whose reply asked for the tool execution.",
    "tool_events.target_kind": "What feedback named as the target; null: stated with a call.",
    "tool_events.target": "The name of that target.",
    "tool_events.tool_id": "Id of the tool call.",
    "tool_events.name": "Name of the tool.",
    "tool_events.status": "How the execution ended.",
    "tool_events.detail": "Details, as stated.",
    "tool_events.ms": "Duration in milliseconds, as stated.",
    "tool_events.source": "Who said so; see `docs/howto/tool-status.md`.",
    "tool_events.quotes": "Digests of the texts among its tool call's arguments, by which a call "
    "that no reply asked for is known by the reply that it was made of.",
    "tool_events.at": "Time of the statement.",
    "feedback.id": "Id, as in the reply of `/feedback`.",
    "feedback.metric": "Name of the metric.",
    "feedback.value": "Value that is a number; `true` is 1, `false` 0. Null with a null `label`: "
    "what was stated before is withdrawn.",
    "feedback.label": "Value that is a text.",
    "feedback.target_kind": "What the statement names.",
    "feedback.target": "The name of that target.",
    "feedback.episode_id": "Episode; null until the target is known.",
    "feedback.call_id": "Call; null if the target is an episode or is not known yet.",
    "feedback.request_id": "POST that it came with.",
    "feedback.at": "Time of the statement.",
    "feedback_requests.id": "Id.",
    "feedback_requests.idempotency_key": "Value of `Idempotency-Key`, if any.",
    "feedback_requests.body_hash": "SHA-256 of the body, if there is a key.",
    "feedback_requests.at": "Time of the request.",
    "feedback_requests.api_key": "Id of the API key that it came with; null: let in without one.",
    "feedback_keys.idempotency_key": "Value of `Idempotency-Key`.",
    "feedback_keys.body_hash": "SHA-256 of the body that took the key.",
    "feedback_keys.at": "Time it was taken.",
}
TRAINING: Final = {
    "policies.name": "Name of the policy.",
    "policies.version": "Number of the version; 0: the base model.",
    "policies.tenant": "Whose the policy is; it never changes.",
    "policies.state": "State of the version.",
    "policies.served_name": "Model name on the upstream: `NAME@N`, or the base model's own.",
    "policies.adapter_path": "Folder of the adapter; null for version 0.",
    "policies.update_id": "Update that made it; null for version 0.",
    "policies.created_at": "Time it was made.",
    "policies.changed_at": "Time of its last change of state.",
    "policies.files_deleted_at": "Time its files were deleted; null: they are there.",
    "policies.share": "Share of new episodes: of a canary, and of what was rolled back as one, the "
    "share it was tried on; of version 0, the share that stays on the base model; null: none.",
    "policies.gate": "Rule by which it is judged, as the recipe had it, and the digest of what "
    "its rewards are made by (JSON); null: by none.",
    "policies.rolled_back_at": "Time it was rolled back, which stays; null: it was not.",
    "policies.frozen_at": "Of version 0: since when only operators move the policy's traffic.",
    "policy_events.id": "Id (UUIDv7); events of a version sort by it.",
    "policy_events.name": "Name of the policy.",
    "policy_events.version": "Number of the version.",
    "policy_events.from_state": "State before; null: it was made.",
    "policy_events.to_state": "State after.",
    "policy_events.reason": "Why.",
    "policy_events.actor": "Who changed it.",
    "policy_events.evidence": "What the decision rested on (JSON); null: nothing but the reason.",
    "policy_events.at": "Time.",
    "updates.id": "Id.",
    "updates.policy": "Policy that is trained.",
    "updates.parent_version": "Version that training starts from.",
    "updates.version": "Version that was made; null: none.",
    "updates.state": "State; `expired`: it only spent episodes that could no longer be trained.",
    "updates.recipe": "Recipe in full; see `recipe.md`.",
    "updates.metrics": "Measurements, such as mean reward, drift and seconds.",
    "updates.group_size": "Size that groups are filled up to with episodes of earlier updates.",
    "updates.oldest_version": "Oldest version whose episodes it may train.",
    "updates.baselines": "Moving baselines after the update.",
    "updates.claimed_at": "Time of the claim.",
    "updates.finished_at": "Time it ended.",
    "episode_policies.episode_id": "Episode.",
    "episode_policies.policy": "Policy that served a call of it.",
    "episode_policies.own_version": "Lowest version that served a call under the episode's own "
    "key; null: only calls of its parts.",
    "episode_policies.own_latest": "Highest version that served a call under the episode's own "
    "key; null: only calls of its parts.",
    "episode_policies.version": "Lowest version that served a call of the whole episode.",
    "episode_policies.latest": "Highest version that served a call of the whole episode: the one "
    "that it goes on with.",
    "episode_policies.claimed_by": "Update that holds or has spent the episode for the policy.",
    "episode_policies.task": "Task of the whole episode.",
    "episode_policies.api_key": "As in `episodes`; what a recipe's `claim.most_of_key` counts by.",
    "episode_policies.scored_at": "As in `episodes`; by the policy's own sum, if it has one.",
    "episode_policies.call_scored_at": "As in `episodes`; by the policy's own sum, if it has one.",
    "episode_policies.reward": "As in `episodes`; by the policy's own sum, if it has one.",
    "episode_policies.lacks": "Why that sum gives no reward although some of it was stated: "
    "`missing_metric`, or `undeclared_text`.",
    "reward_terms.policy": "Policy.",
    "reward_terms.metric": "Metric of `feedback`.",
    "reward_terms.place": "Place in the sum.",
    "reward_terms.weight": "Factor of the value.",
    "reward_terms.low": "Lowest value that counts.",
    "reward_terms.high": "Highest value that counts.",
    "reward_terms.fallback": "Value where none was stated; null: then there is no reward.",
    "reward_terms.texts": "Values of what may be stated in words (JSON).",
    "episode_policies.failed": "Whether the last call of the whole episode was refused for what "
    "it says.",
    "episode_policies.last_call_at": "Time of the last call of the whole episode.",
    "episode_policies.claimable": "Whether the episode is whole (no part of another) and not "
    "quarantined.",
    "consumptions.episode_id": "Episode.",
    "consumptions.policy": "Policy that spent it: the update's.",
    "consumptions.update_id": "Update that spent it.",
    "consumptions.trained": "Whether it carried loss.",
    "consumptions.reason": "Why it did not, such as `stale`, `aged`, `rolled_back`, `alone`, "
    "`damaged`, `non_finite`, `too_long` or `low_reward`; `left_out`: a rebuild has left it out "
    "since, and it may have carried loss.",
    "consumptions.at": "Time.",
    "fault_times.policy": "Policy.",
    "fault_times.called_since": "Its beginning: what had a call since then is set aside,",
    "fault_times.began_before": "if it began before this id (UUIDv7), which is its end.",
    "lapses.id": "Id (UUIDv7).",
    "lapses.called_since": "An hour before its beginning: what had a call since then is set aside,",
    "lapses.began_before": "if it began before this id (UUIDv7), made an hour after its end.",
    "judgements.episode_id": "Episode.",
    "judgements.judge": "Name of the judge.",
    "judgements.outcome": "What came of it; scores are in `feedback`.",
    "judgements.reason": "Why it failed or could not tell.",
    "judgements.attempts": "How often the judge was asked.",
    "judgements.last_call_at": "The episode's last call when the judge saw it; after a later call "
    "it is asked again.",
    "judgements.due_at": "Time of the next attempt; null: none.",
    "judgements.at": "Time of the answer.",
}
SENTINELS: Final = {
    "sentinels.judge": "Name of the judge; that of a tenant other than the default one begins with "
    "the tenant and U+001F, here and in the two tables below.",
    "sentinels.episode_id": "Episode.",
    "sentinels.metric": "Metric of the judge's answer whose value is the score.",
    "sentinels.digest": "First 16 bytes of the SHA-256 of the line that the judge is shown. Once "
    "the line has another, the judge is not asked.",
    "sentinels.draws": "How many of its first scores are its reference.",
    "sentinels.since_round": "Round from which on its scores count.",
    "sentinels.at": "Time it was added.",
    "sentinel_scores.judge": "Judge.",
    "sentinel_scores.episode_id": "Episode.",
    "sentinel_scores.round": "Number of the judge's round.",
    "sentinel_scores.outcome": "What came of it; `changed`: the judge was not asked.",
    "sentinel_scores.score": "Mean of what the judge stated of the metric.",
    "sentinel_scores.reason": "Why it failed, or was not asked.",
    "sentinel_scores.at": "Time of the answer.",
    "sentinel_rounds.judge": "Judge.",
    "sentinel_rounds.round": "Number of the round, from 1.",
    "sentinel_rounds.begun_at": "Time it was begun.",
    "sentinel_rounds.ended_at": "Time it ended; null: it was broken off, or goes on.",
    "sentinel_rounds.scored": "Sentinels that were scored.",
    "sentinel_rounds.unscored": "Those that the judge was asked about and did not score.",
    "sentinel_rounds.changed": "Those that it was not asked about, as their line had changed.",
    "sentinel_rounds.compared": "Those that were scored and have a reference.",
    "sentinel_rounds.mean": "Mean difference of their scores from the means of their references; "
    "null, as the next three: none were compared.",
    "sentinel_rounds.mean_absolute": "Mean size of that difference.",
    "sentinel_rounds.evidence": "Evidence that the judge has drifted "
    "(`pawl/judging/sentinels/drift.py`).",
    "sentinel_rounds.drifted": "Whether that was enough; null: too few were compared for any "
    "evidence that is.",
}
KEYS: Final = {
    "api_keys.id": "Id of the key, which is a part of it and no secret.",
    "api_keys.name": "Name; no two keys that count have the same.",
    "api_keys.tenant": "Whose it is: with it one sees, scores and trains what is this tenant's.",
    "api_keys.hash": "SHA-256 of the key, which itself is kept nowhere.",
    "api_keys.scopes": "What it may be used for.",
    "api_keys.per_minute": "Requests that may begin in a minute; null: any number.",
    "api_keys.at_once": "Requests that may run at once; null: any number.",
    "api_keys.tokens_per_minute": "Tokens of calls in a minute; null: any number.",
    "api_keys.created_at": "Time it was made.",
    "api_keys.revoked_at": "Time it was revoked; null: it counts.",
}
COLUMNS: Final = {
    **{f"episodes.{name}": text for name, text in EPISODES.items()},
    **{f"transitions.{name}": text for name, text in TRANSITIONS.items()},
    **JOINS,
    **FEEDBACK,
    **TRAINING,
    **KEYS,
    **SENTINELS,
}
