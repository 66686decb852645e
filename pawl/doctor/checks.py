"""Check facts for what keeps a policy from learning, the cause most upstream first (pure)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Final, Literal, get_args

from msgspec.structs import replace

from pawl.doctor.facts import Facts, PolicyFacts
from pawl.stack.preflight import DISK_GIB
from store.adapter_slots import free_slots
from store.link.outages import IN_OUTAGE, LOST_CALL
from store.read.health import CallKind
from store.records import EVAL, TRAIN, Record
from trainer.settings import USUAL_SLOTS
from trainer.updates.circuit_breaker import PauseReason
from trainer.updates.training_warnings import MOST_UNTRAINED

Area = Literal["traffic", "capture", "learning", "stability", "publishing", "storage"]
Figure = int | float | str
NO_FIGURES: Final[Mapping[str, Figure]] = {}


class Finding(Record, frozen=True, kw_only=True):
    """Say what keeps a policy from learning, or when it will learn next.

    `since` is when that began, as far as it is known. `remedy` is one command or setting.
    `needs_person` is False where it passes by itself.
    """

    title: str
    since: datetime | None = None
    figures: Mapping[str, Figure] = NO_FIGURES
    remedy: str
    needs_person: bool = True
    area: Area


Check = Callable[[Facts], Iterable[Finding]]
# Beyond this without a call nothing arrives; and a proxy with younger ones works, wherever it is.
SILENT: Final = timedelta(days=1)
RECENT: Final = timedelta(minutes=5)
# A trainer begins its policies one by one, and tests the model servers first.
BEGINS: Final = timedelta(minutes=30)
# Evaluation may take as long before the first work.
EVALUATED: Final = timedelta(hours=1)
# Records that wait on disk, as the alert PawlSpoolGrows has it.
MOST_SPOOLED: Final = 1000
# What is served of a version, and drift, are said to be near the recipe's limits past these shares
# of them, as the alerts have it.
NEAR_TOLERANCE: Final = 2 / 3
NEAR_DRIFT: Final = 0.5
# So many names a text lists.
MOST_NAMED: Final = 3
LONGEST: Final = 80
# The fewest episodes of which equal rewards mean something.
FEWEST_EQUAL: Final = 8

# A learner that imitates successes trains these all the same (docs/explanation/trainer.md).
IMITATED: Final = frozenset({"greedy", "constrained_sampling"})
# These are about serving, and count for evaluation, too.
BROKEN: Final = frozenset({"incomplete", "error_reply"})
# Of every `proxy.trainable.Reason`.
REASONS: Final[Mapping[str, str]] = {
    "incomplete": "raise the client's timeout, or send less at once: calls break off before their"
    " reply has ended",
    "error_reply": "ask once with curl, and read the model server's log: it answers with errors",
    "not_text": "send text alone: calls with images, sounds or files are not trained",
    "no_token_ids": "serve the policy with vLLM: the server gives no token ids (return_token_ids)",
    "length_mismatch": "start vLLM with --logprobs-mode processed_logprobs, and nothing that"
    " changes its replies before the proxy",
    "impossible_logprobs": "start vLLM with --logprobs-mode processed_logprobs",
    "usage_mismatch": "let nothing change the server's replies before the proxy",
    "empty": "raise the client's max_tokens: replies have no token",
    "several_choices": "ask for one choice: n = 1",
    "unreadable_sampling": "leave out fields that are not the API's own; `sampling` in `pawl"
    " export` names them (docs/explanation/trainer.md)",
    "greedy": "ask with temperature = 1 (ChatOpenAI(temperature=1), ModelSettings(temperature=1)),"
    " or set explore = { share = 0.1, temperature = 0.7 } in PAWL_POLICIES",
    "reshaped_distribution": "leave out logits_processors, vllm_xargs, best_of, beam search and"
    " thinking budgets",
    "constrained_sampling": "set PAWL_TOOL_PARSER to the server's --tool-call-parser; else make"
    " tools not strict (Agents SDK: @function_tool(strict_mode=False))",
    "unknown_policy": "ask for the policy by its name, or for one of its versions",
    "fixed_policy": "set trained = true in PAWL_POLICIES",
    "nested_too_deep": "send less deeply nested JSON",
    "redacted": "narrow the rules of PAWL_REDACTION: redacted calls are not trained",
}
WHATS: Final[Mapping[str, str]] = {
    "greedy": "are asked at temperature 0, and sample nothing",
    "incomplete": "broke off",
    "error_reply": "came to an error",
    "no_token_ids": "have no token ids",
}
PAUSES: Final[Mapping[PauseReason, str]] = {
    "failed": "read why in the trainer's log (training_paused)",
    "out_of_memory": "give the trainer more memory: `pawl plan` says what the model takes",
    "drift": "set PAWL_DEFAULT_TEMPERATURE, PAWL_DEFAULT_SAMPLING and PAWL_TOOL_PARSER to what the"
    " model server uses",
    "rejected": "read in the trainer's log how the model server serves what is trained"
    " (probe_failed)",
    "server": "start the model server as docs/howto/operate.md says; the trainer's log has what it"
    " does wrong (self_test)",
    "server_away": "start the model server; the trainer tests it, and goes on by itself",
    "no_slot": "raise the model server's --max-loras, and PAWL_ADAPTER_SLOTS with it",
}


def findings(facts: Facts, *, of_parts: bool = True) -> list[Finding]:
    """Return what needs a person, the cause most upstream first, and then what passes by itself.

    Unless `of_parts`, processes, servers and disks, which all tenants share, are left out, and so
    are figures that name them.
    """
    checks = [check for check in CHECKS if of_parts or check not in OF_PARTS]
    found = [
        finding if of_parts or check not in NAME_PARTS else replace(finding, figures=NO_FIGURES)
        for check in checks
        for finding in check(facts)
    ]
    return sorted(found, key=lambda finding: not finding.needs_person)


def _of_each_policy(check: Callable[[Facts, PolicyFacts], Finding | None]) -> Check:
    """Return a check of all policies for one of a policy."""

    def checked(facts: Facts) -> Iterator[Finding]:
        for policy in facts.policies:
            finding = check(facts, policy)
            if finding is not None:
                yield finding

    return checked


def _named(names: Iterable[str]) -> str:
    """Return some of the names, and how many more there are."""
    # Clients choose many names, and write anything.
    every = [
        name if name.isprintable() and len(name) <= LONGEST else f"{name!r:.80}" for name in names
    ]
    more = f" and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else ""
    return ", ".join(every[:MOST_NAMED]) + more


# Settings, and what all processes need


def unusable_files(facts: Facts) -> Iterator[Finding]:
    """Find settings' files that cannot be used, or lack a key; not so where a process has them."""
    for setting, why in facts.unusable.items():
        process = facts.proxy if setting == "PAWL_UPSTREAMS" else facts.trainer
        yield Finding(
            title=f"{setting} cannot be used",
            figures={"error": why},
            remedy="correct what the error names, here or where the process runs",
            needs_person=not process.answers,
            area="traffic" if process is facts.proxy else "learning",
        )


def missing_key(facts: Facts) -> Iterator[Finding]:
    """Find that the proxy asks for a key where there is none: evaluations and judges need it."""
    if facts.proxy.asks_key:
        evaluates = any(
            policy.recipe is not None and policy.recipe.publish.mode == "evaluated"
            for policy in facts.policies
        )
        yield Finding(
            title="PAWL_API_KEY is not one that the proxy takes: its metrics are not read",
            figures={"address": facts.proxy.address},
            remedy="set PAWL_API_KEY to a key with the scope read (`pawl keys create doctor"
            " --scope read`), or make a file of that name in PAWL_SECRETS_DIR",
            needs_person=evaluates,
            area="traffic",
        )


def database_away(facts: Facts) -> Iterator[Finding]:
    """Find a database that does not answer: nothing is trained, and records wait on disk."""
    if facts.database is not None:
        yield Finding(
            title="The database cannot be used: records wait on disk, and nothing is trained",
            figures={"error": facts.database},
            remedy="start PostgreSQL, or correct DATABASE_URL; without tables run `pawl migrate`",
            area="storage",
        )


def database_slow(facts: Facts) -> Iterator[Finding]:
    """Find that the database took too long to say all."""
    if facts.is_late:
        yield Finding(
            title="The database took too long: some policies and calls were not looked at",
            figures={"policies_looked_at": len(facts.policies)},
            remedy="ask again when the database has less to do",
            area="storage",
        )


def disk_full(facts: Facts) -> Iterator[Finding]:
    """Find disks that are nearly full."""
    for disk in facts.disks:
        if disk.free_gib < DISK_GIB:
            yield Finding(
                title=f"The disk of {disk.folder} is nearly full",
                figures={"free_gib": round(disk.free_gib, 2)},
                remedy=f"free space there, or set {disk.setting} to a folder on another disk",
                area="storage",
            )


def records_wait(facts: Facts) -> Iterator[Finding]:
    """Find records that are lost, refused, or wait on disk in growing numbers."""
    proxy, drain = facts.proxy, facts.proxy.ready.drain
    outage_s = proxy.ready.recording_outage_s
    if outage_s > 0:
        yield Finding(
            title="Records are being lost: the spool's disk takes no more",
            since=facts.now - timedelta(seconds=outage_s),
            figures={"lost": int(proxy.value("pawl_records_dropped_total") or 0)},
            remedy="free space on the disk of PAWL_SPOOL_DIR",
            area="capture",
        )
    spooled = int(proxy.value("pawl_records_spooled") or drain.held)
    if facts.database is None and (drain.state == "stuck" or spooled > MOST_SPOOLED):
        yield Finding(
            title="Records wait on disk and are not stored",
            since=facts.now - timedelta(seconds=drain.for_s),
            figures={"waiting": spooled, "reason": drain.reason or "unknown"},
            remedy="read the reason with `pawl spool`; many records need a faster database",
            area="capture",
        )
    if facts.letters:
        yield Finding(
            title="The database refused records, which are kept as dead letters",
            figures={"dead_letters": facts.letters},
            remedy="read why with `pawl spool`, then `pawl spool --replay`",
            area="capture",
        )


# Traffic


def proxy_away(facts: Facts) -> Iterator[Finding]:
    """Find a proxy that does not answer, unless calls have just been recorded."""
    last = facts.last_call_at
    if not facts.proxy.answers and (last is None or facts.now - last > RECENT):
        yield Finding(
            title="The proxy does not answer",
            since=last,
            figures={"address": facts.proxy.address, "error": facts.proxy.why_not or ""},
            remedy="start `pawl proxy` (or `pawl up`); PAWL_ADMIN_LISTEN is where it is asked",
            area="traffic",
        )
    elif facts.proxy.ready.workers and "no worker" in facts.proxy.ready.status:
        yield Finding(
            title="No worker of the proxy takes calls",
            remedy="read why they end in the proxy's log",
            area="traffic",
        )


def server_away(facts: Facts) -> Iterator[Finding]:
    """Find model servers that do not answer, and base models that none of them serves."""
    for server in facts.servers:
        if server.why_not is not None:
            yield Finding(
                title=f"The model server at {server.url} does not answer",
                figures={"error": server.why_not},
                remedy="start vLLM, or correct PAWL_UPSTREAM_URL",
                area="traffic",
            )
    listed = {
        name
        for server in facts.servers
        for name, model in server.models.items()
        if not model.get("parent")
    }
    for base in sorted({policy.about.base for policy in facts.policies} - listed if listed else ()):
        names = _named(policy.name for policy in facts.policies if policy.about.base == base)
        yield Finding(
            title=f"The model server does not have {base}, the base model of {names}",
            figures={"models": _named(sorted(listed))},
            remedy=f"start vLLM with --served-model-name {base}, or correct PAWL_UPSTREAM_URL",
            area="traffic",
        )


def trainer_away(facts: Facts) -> Iterator[Finding]:
    """Find a trainer that does not run: by its port, and by the policies that it holds."""
    trained = [policy.about.trained_at for policy in facts.policies]
    since = max((at for at in trained if at is not None), default=None)
    left = facts.trainer.values("pawl_policy_left")
    if facts.trainer.answers or any(policy.about.is_held for policy in facts.policies):
        idle = [p.name for p in facts.policies if not p.about.is_held and not left.get(p.name)]
        if idle or facts.unbegun:
            started_s = facts.trainer.value("process_start_time_seconds") or 0.0
            begins = facts.now.timestamp() - started_s < BEGINS.total_seconds()
            yield Finding(
                title=f"No trainer works on {_named([*idle, *facts.unbegun])}",
                since=since if idle else None,
                remedy="wait: the trainer has just been started, and begins one after the other"
                if begins
                else "read why in the trainer's log (trainer_waits); PAWL_POLICY, if set, and"
                " PAWL_POLICIES must name all policies that it is to train",
                needs_person=not begins,
                area="learning",
            )
        return
    why = facts.trainer.why_not or ""
    loads = "being loaded" in why
    yield Finding(
        title="The trainer loads its model" if loads else "No trainer runs",
        since=since,
        figures={"address": facts.trainer.address, "error": why},
        remedy="wait until it is loaded" if loads else "start `pawl trainer` (or `pawl up`)",
        needs_person=not loads,
        area="learning",
    )


def no_calls(facts: Facts) -> Iterator[Finding]:
    """Find that no call was recorded for a day, and whether callers are refused."""
    last = facts.last_call_at
    is_unknown = facts.database is not None or (facts.is_late and last is None)
    if is_unknown or (last is not None and facts.now - last < SILENT):
        return
    refused = facts.proxy.value("pawl_refused_total", reason="NoKey") or 0
    remedy = f"set OPENAI_BASE_URL={facts.data_url}/v1 where the agent runs"
    if refused:
        remedy = "give the agent a key as OPENAI_API_KEY (`pawl keys create agent`)"
    yield Finding(
        title="No calls arrive" if last is None else "No calls arrived for a day",
        since=last,
        figures={"calls": 0, "refused_without_key": int(refused)},
        remedy=remedy,
        area="traffic",
    )


def unanswered(facts: Facts) -> Iterator[Finding]:
    """Find calls for models that no policy answers."""
    kinds = [one for one in facts.calls if one.policy is None]
    calls, every = sum(one.calls for one in kinds), sum(one.calls for one in facts.calls)
    if not calls or calls <= MOST_UNTRAINED * every:
        return
    models = Counter[str]()
    for one in kinds:
        models[one.model or "(none named)"] += one.calls
    known = _named([*(policy.name for policy in facts.policies), *facts.unbegun])
    asked = _named(name for name, _ in models.most_common())
    yield Finding(
        title=f"Calls ask for {asked}, and no policy answers that",
        since=min(one.first_at for one in kinds),
        figures={"unanswered": calls, "calls": every, "policies": known or "none"},
        remedy=f'let the agent ask for model = "{facts.policies[0].name}", or add'
        " models = [...] to the policy in PAWL_POLICIES"
        if facts.policies
        else "start `pawl trainer`, which begins the policy",
        needs_person=calls == every,
        area="traffic",
    )


# Calls and episodes that cannot be trained


def broken(facts: Facts) -> Iterator[Finding]:
    """Find policies of which many calls break off, or come to an error, evaluation included."""
    for name in sorted({one.policy for one in facts.calls if one.policy is not None}):
        own = [one for one in facts.calls if one.policy == name]
        yield from _too_many(name, own, [one for one in own if one.reason in BROKEN])


def untrainable(facts: Facts) -> Iterator[Finding]:
    """Find policies of which many calls have an end from which nothing can be learned."""
    trained = {policy.name: policy for policy in facts.policies}
    kinds = [one for one in facts.calls if one.policy is not None and one.split == TRAIN]
    # A policy that is not to be trained is no trouble beside one that is.
    answered = {one.policy for one in kinds if one.policy is not None}
    for name in sorted(answered & trained.keys() or answered):
        recipe = trained[name].recipe if name in trained else None
        imitates = recipe is not None and recipe.kept is not None
        expected = {None, *BROKEN, *(IMITATED if imitates else ())}
        own = [one for one in kinds if one.policy == name]
        yield from _too_many(name, own, [one for one in own if one.reason not in expected])


def _too_many(name: str, kinds: list[CallKind], bad: list[CallKind]) -> Iterator[Finding]:
    """Find that the bad ones are more than a fifth of a policy's newest calls."""
    every, calls = sum(one.calls for one in kinds), sum(one.calls for one in bad)
    if calls <= MOST_UNTRAINED * every:
        return
    figures, reasons = Counter[str](), Counter[str]()
    for one in bad:
        reason = one.reason or ""
        reasons[reason] += one.calls
        figures[f"{reason} {one.http_status}" if reason == "error_reply" else reason] += one.calls
    [(reason, _)] = reasons.most_common(1)
    yield Finding(
        title=f"{name}: {calls} of the newest {every} calls"
        f" {WHATS.get(reason, 'cannot be trained')}",
        since=min(one.first_at for one in bad if one.reason == reason),
        figures=dict(figures.most_common()),
        # A reason that another version of Pawl wrote may be unknown here.
        remedy=REASONS.get(reason, "docs/explanation/trainer.md says what each reason means"),
        needs_person=2 * calls > every,
        area="capture",
    )


def only_evaluation(facts: Facts) -> Iterator[Finding]:
    """Find that all calls are of evaluation, which is never trained on."""
    if facts.calls and all(one.split == EVAL for one in facts.calls):
        began = min(one.first_at for one in facts.calls)
        yield Finding(
            title="Only evaluation arrives, which is never trained on",
            since=began,
            figures={"calls": sum(one.calls for one in facts.calls)},
            remedy="let the agent work without the header x-pawl-split, on tasks that do not begin"
            " as PAWL_EVAL_TASKS says",
            needs_person=facts.now - began > EVALUATED,
            area="traffic",
        )


@_of_each_policy
def quarantined(_: Facts, policy: PolicyFacts) -> Finding | None:
    """Find that more than a fifth of the newest episodes are quarantined."""
    counts = policy.counts
    every = counts.episodes + counts.quarantined
    if not counts.quarantined or counts.quarantined <= MOST_UNTRAINED * every:
        return None
    is_disk = counts.quarantined_as in (IN_OUTAGE, LOST_CALL)
    return Finding(
        title=f"{policy.name}: {counts.quarantined} of the newest {every} episodes are quarantined:"
        " it is doubtful which calls they have",
        since=counts.quarantined_since,
        figures={"quarantined": counts.quarantined, "mostly": counts.quarantined_as or ""},
        remedy="keep room on the disk of PAWL_SPOOL_DIR: calls were lost there"
        if is_disk
        else "name each run with the header x-pawl-episode (docs/howto/rewards.md)",
        needs_person=2 * counts.quarantined > every,
        area="capture",
    )


# Rewards


@_of_each_policy
def unrewarded(facts: Facts, policy: PolicyFacts) -> Finding | None:
    """Find episodes without rewards: all of them, or many of those that are over."""
    counts = policy.counts
    lacks = sum(policy.lacks.values())
    if not counts.episodes:
        return None
    if lacks and lacks > MOST_UNTRAINED * (lacks + counts.scored):
        lack = max(policy.lacks, key=lambda one: policy.lacks[one])
        wanted = _named(policy.recipe.reward) if policy.recipe is not None else ""
        return Finding(
            title=f"{policy.name}: {lacks} episodes were spoken of and have no reward ({lack})",
            since=counts.unscored_since,
            figures={**policy.lacks, "scored": counts.scored},
            remedy="send a value for each of these, or give the metric a default in the recipe's"
            f" [reward]: {wanted}"
            if lack == "missing_metric"
            else "give the text a value in the recipe's [reward.METRIC] values",
            area="learning",
        )
    if not counts.scored:
        return Finding(
            title=f"{policy.name}: no rewards",
            since=counts.first_at,
            figures={"episodes": counts.episodes, "with_reward": 0},
            remedy=f"POST a reward for each run to {facts.data_url}/feedback, or run `pawl judge`",
            needs_person=counts.ended > 0,
            area="learning",
        )
    unscored = counts.ended - counts.ended_scored
    if unscored > MOST_UNTRAINED * counts.ended:
        return Finding(
            title=f"{policy.name}: {unscored} of {counts.ended} episodes that are over have no"
            " reward",
            since=counts.unscored_since,
            figures={"ended": counts.ended, "with_reward": counts.ended_scored},
            remedy="POST the missing rewards to /feedback, or run `pawl judge`",
            needs_person=False,
            area="learning",
        )
    return None


@_of_each_policy
def equal_rewards(_: Facts, policy: PolicyFacts) -> Finding | None:
    """Find rewards that are all equal, or equal within each group, so that nothing is learned."""
    counts, rule = policy.counts, policy.rule
    if rule is None or counts.most is None or counts.least is None:
        return None
    figures: dict[str, Figure] = {
        "with_reward": counts.scored,
        "lowest": counts.least,
        "highest": counts.most,
    }
    if rule.least_reward is not None:
        if counts.most >= rule.least_reward or counts.scored < rule.groups:
            return None
        return Finding(
            title=f"{policy.name}: no episode reached the reward that is imitated",
            since=counts.scored_since,
            figures=figures | {"least_reward": rule.least_reward},
            remedy="give easier tasks, or lower sft.min_reward in the recipe",
            area="learning",
        )
    all_equal = counts.least == counts.most and rule.call_rewards_after_s is None
    has_groups = counts.groups > 1 or (counts.largest_group or 0) >= rule.group_size
    groups_equal = has_groups and not counts.groups_that_differ
    is_flat = groups_equal if rule.needs_spread else all_equal
    if counts.scored < FEWEST_EQUAL or not is_flat:
        return None
    return Finding(
        title=f"{policy.name}: all rewards are {counts.most:g}, which teaches nothing"
        if all_equal
        else f"{policy.name}: rewards are equal within each task, which teaches nothing",
        since=counts.scored_since,
        figures=figures | {"groups": counts.groups, "groups_that_differ": 0},
        remedy="give tasks that succeed sometimes, or rewards between all and nothing;"
        " if nearly all fail, begin with the recipe `sft`",
        area="learning",
    )


@_of_each_policy
def alone(facts: Facts, policy: PolicyFacts) -> Finding | None:
    """Find that no two episodes are of one task, under a recipe that compares groups."""
    counts, rule = policy.counts, policy.rule
    if rule is None or rule.group_size == 1 or not counts.scored:
        return None
    problem = policy.problems.get("alone")
    if problem is None and (counts.groups or counts.scored < rule.smallest_group):
        return None
    waited = counts.scored_since is not None and (
        facts.now - counts.scored_since > timedelta(seconds=rule.max_age_s)
    )
    return Finding(
        title=f"{policy.name}: episodes are alone: tasks do not come again, and its recipe compares"
        f" {rule.smallest_group} to {rule.group_size} of one task",
        since=counts.scored_since,
        figures={
            "with_reward": counts.scored,
            "tasks": counts.tasks,
            "largest_group": counts.largest_group or 0,
        },
        remedy="use the recipe `single` (PAWL_RECIPE=single), or name tasks that come again with"
        " the header x-pawl-task",
        needs_person=waited or counts.scored >= rule.group_size,
        area="learning",
    )


# The trainer


def paused(facts: Facts) -> Iterator[Finding]:
    """Find policies that a running trainer left, or whose training is paused."""
    for name, value in facts.trainer.values("pawl_policy_left").items():
        if value and _is_shown(facts, name):
            yield Finding(
                title=f"{name}: the trainer left it after a failure",
                remedy="read why in the trainer's log (policy_left)",
                area="stability",
            )
    for reason in get_args(PauseReason):
        for name, value in facts.trainer.values("pawl_trainer_paused", reason=reason).items():
            if value and _is_shown(facts, name):
                yield Finding(
                    title=f"{name}: training is paused ({reason})",
                    since=_of(facts, name, lambda policy: policy.about.trained_at),
                    figures={"reason": reason},
                    remedy=PAUSES[reason],
                    # A trainer tests by itself whether it can go on.
                    needs_person=reason not in ("server_away", "no_slot"),
                    area="stability",
                )


def _is_shown(facts: Facts, name: str) -> bool:
    """Return whether a policy is one of those that were asked for, as far as that is known."""
    if facts.tenant is None and (facts.database is not None or facts.is_late):
        return True
    return any(policy.name == name for policy in facts.policies)


def _of(
    facts: Facts, name: str, value: Callable[[PolicyFacts], datetime | None]
) -> datetime | None:
    return next((value(policy) for policy in facts.policies if policy.name == name), None)


def no_slot(facts: Facts) -> Iterator[Finding]:
    """Find that all adapter slots of the model server are taken, so that no update begins."""
    slots = min((one.slots for one in facts.servers if one.slots is not None), default=USUAL_SLOTS)
    waiting = [p for p in facts.policies if p.live is not None and not free_slots(p.live, slots)]
    for live in [policy.live for policy in waiting if policy.live is not None][:1]:
        yield Finding(
            title=f"{_named(policy.name for policy in waiting)}: no update begins, as all {slots}"
            " adapter slots of the model server are taken",
            figures={"taken": live.total, "slots": slots, "kept_for_episodes": live.kept},
            remedy="start vLLM with a larger --max-loras, and set PAWL_ADAPTER_SLOTS to it",
            # Others are free once the episodes of older versions have ended.
            needs_person=live.serving + live.held >= slots,
            area="publishing",
        )


@_of_each_policy
def spent_untrained(_: Facts, policy: PolicyFacts) -> Finding | None:
    """Find that the last updates spent episodes untrained (stale, too long), or had no signal."""
    for kind in ("untrained", "no_signal"):
        problem = policy.problems.get(kind)
        if problem is not None:
            return Finding(
                title=f"{policy.name}: {problem.why}",
                since=policy.about.trained_at,
                remedy=problem.remedy,
                area="stability",
            )
    return None


def too_long(facts: Facts) -> Iterator[Finding]:
    """Find that the model server takes longer calls than fit into the trainer's memory."""
    longest = facts.trainer.value("pawl_longest_call_tokens")
    served = [
        int(model["max_model_len"])
        for server in facts.servers
        for model in server.models.values()
        if isinstance(model.get("max_model_len"), int)
    ]
    if longest is not None and served and max(served) > longest:
        yield Finding(
            title=f"Calls longer than {longest:.0f} tokens do not fit into the trainer's memory",
            figures={"longest_trained": int(longest), "longest_served": max(served)},
            remedy=f"set PAWL_MAX_MODEL_LEN={longest:.0f}, or give the trainer more memory;"
            " `pawl plan` says how much",
            needs_person=False,
            area="learning",
        )


@_of_each_policy
def drifted(facts: Facts, policy: PolicyFacts) -> Finding | None:
    """Find that model server and trainer disagree about a version."""
    if policy.recipe is None:
        return None
    limits = {
        "drift_kl": NEAR_DRIFT * policy.recipe.off_policy.max_drift,
        "probe_difference": NEAR_TOLERANCE * policy.recipe.publish.tolerance,
    }
    values = {
        name: facts.trainer.value(f"pawl_update_{name}", policy=policy.name) for name in limits
    }
    past = {
        name: round(value, 4)
        for name, value in values.items()
        if value is not None and value > limits[name]
    }
    if not past:
        return None
    return Finding(
        title=f"{policy.name}: model server and trainer disagree about one version",
        since=policy.about.trained_at,
        figures=past,
        remedy="set PAWL_DEFAULT_TEMPERATURE, PAWL_DEFAULT_SAMPLING and PAWL_TOOL_PARSER to what"
        " the model server uses",
        area="stability",
    )


# Versions


@_of_each_policy
def frozen(_: Facts, policy: PolicyFacts) -> Finding | None:
    """Find that a person froze the policy: no new version gets the traffic."""
    if policy.about.frozen_at is None:
        return None
    return Finding(
        title=f"{policy.name} is frozen: no new version gets the traffic",
        since=policy.about.frozen_at,
        remedy=f"run `pawl policies freeze {policy.name} --off`",
        area="publishing",
    )


@_of_each_policy
def not_as_trained(facts: Facts, policy: PolicyFacts) -> Finding | None:
    """Find versions that a server lacks, has from another folder, or serves otherwise."""
    said = facts.controller.ready
    troubles = dict[str, Figure]()
    for server in facts.servers:
        # What another model's server has says nothing about this one's.
        for version in policy.servable if policy.about.base in server.models else ():
            listed = server.models.get(version.served_name)
            if listed is None:
                troubles.setdefault(version.served_name, f"{server.url} does not have it")
            elif version.adapter_path is not None and listed.get("root") != version.adapter_path:
                troubles.setdefault(
                    version.served_name,
                    f"{server.url} serves {listed.get('root')}, not {version.adapter_path}",
                )
    names = {version.served_name for version in policy.servable}
    for reasons in (said.altered, said.unread, *said.misserved.values()):
        troubles |= {name: why for name, why in reasons.items() if name in names}
    if not troubles:
        return None
    return Finding(
        title=f"{policy.name}: not served as trained: {_named(sorted(troubles))}",
        since=policy.standing.serving.since if policy.standing is not None else None,
        figures=dict(sorted(troubles.items())[:MOST_NAMED]),
        remedy="start `pawl controller`, which loads it; `pawl policies check` says what is wrong"
        " with files",
        area="publishing",
    )


def controller_away(facts: Facts) -> Iterator[Finding]:
    """Find a controller that does not answer; it matters where something is to be decided."""
    if facts.controller.answers:
        return
    is_needed = any(
        policy.waits is None
        and policy.standing is not None
        and (policy.standing.canary or policy.standing.candidate)
        for policy in facts.policies
    )
    yield Finding(
        title="The controller does not answer",
        figures={"address": facts.controller.address, "error": facts.controller.why_not or ""},
        remedy="start `pawl controller` (or `pawl up`): it loads adapters again and decides about"
        " versions",
        needs_person=is_needed,
        area="publishing",
    )


@_of_each_policy
def undecided(facts: Facts, policy: PolicyFacts) -> Finding | None:
    """Find a version that waits for a person, or is still compared, with the evidence so far."""
    standing = policy.standing
    if standing is None:
        return None
    if policy.waits is not None:
        return Finding(
            title=f"{policy.name}@{policy.waits.version} waits for approval",
            since=policy.waits.at,
            figures={"evidence": policy.waits.reason},
            remedy=f"run `pawl policies promote {policy.name}@{policy.waits.version}`",
            area="publishing",
        )
    tried = standing.canary or standing.candidate
    if tried is None or standing.frozen:
        return None
    said = facts.controller
    figures: dict[str, Figure] = {}
    about = {"policy": policy.name, "compared": "trial"}
    for version, count in said.values("pawl_controller_gate_episodes", **about).items():
        figures[f"episodes_{version}"] = int(count)
    for bound, value in said.values("pawl_controller_gate_bound", **about).items():
        figures[bound] = round(value, 4)
    if tried.version.share is not None:
        figures["share"] = round(tried.version.share, 4)
    return Finding(
        title=f"{tried.version.served_name} is being tried: the decision is pending",
        since=tried.since,
        figures=figures,
        remedy="wait: the controller decides (publish.decide_within_h in the recipe)",
        needs_person=False,
        area="publishing",
    )


# How soon it learns


@_of_each_policy
def waits_for_signal(facts: Facts, policy: PolicyFacts) -> Finding | None:
    """Say how many episodes the next update lacks, and when they come at today's rate."""
    counts, rule = policy.counts, policy.rule
    is_ready = policy.updates >= 1 or policy.about.running_since is not None
    if rule is None or is_ready or not counts.scored or counts.most is None:
        return None
    if rule.needs_spread and counts.groups and not counts.groups_that_differ:
        return None
    missing = (1 - policy.updates) * rule.groups * rule.group_size
    # Of groups that do not differ as many again are needed.
    if rule.group_size > 1 and rule.needs_spread and counts.groups:
        missing *= counts.groups / max(1, counts.groups_that_differ)
    began = min(counts.first_at or facts.now, facts.now - timedelta(hours=1))
    hours = min(24.0, (facts.now - began) / timedelta(hours=1))
    rate = counts.scored_today / hours
    figures: dict[str, Figure] = {
        "with_reward": policy.ready,
        "episodes_more": round(missing),
        "an_hour": round(rate, 2),
    }
    when = "which do not come"
    if rate:
        figures["hours"] = round(missing / rate, 1)
        when = f"which come within {missing / rate:.2g} hours at today's rate"
    if policy.updates:
        when += f", and begins without them once a group has waited {rule.max_age_s:g} s"
    return Finding(
        title=f"{policy.name}: the next update lacks about {missing:.0f} episodes with rewards,"
        f" {when}",
        since=policy.about.trained_at,
        figures=figures,
        remedy="wait, or lower claim.groups in the recipe",
        needs_person=False,
        area="learning",
    )


# In order of importance: what is upstream comes first.
CHECKS: Final[tuple[Check, ...]] = (
    *(unusable_files, database_away, database_slow, disk_full, records_wait),
    *(proxy_away, server_away, trainer_away, no_calls, unanswered),
    *(broken, untrainable, only_evaluation, quarantined, unrewarded, equal_rewards, alone),
    *(paused, no_slot, spent_untrained, drifted),
    *(frozen, not_as_trained, controller_away, undecided),
    *(missing_key, too_long, waits_for_signal),
)
OF_PARTS: Final[tuple[Check, ...]] = (
    *(unusable_files, disk_full, records_wait),
    *(proxy_away, server_away, trainer_away, no_slot, controller_away, missing_key),
)
NAME_PARTS: Final[tuple[Check, ...]] = (database_away, not_as_trained)
