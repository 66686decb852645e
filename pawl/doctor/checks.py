"""Check processes, servers, disks and calls for causes that keep policies from learning (pure)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Final

from msgspec.structs import replace

from pawl.doctor.facts import Facts, PolicyFacts
from pawl.stack.preflight import DISK_GIB
from store.adapter_slots import LONGEST_KEPT_S, free_slots
from store.read.health import CallCount
from store.records import EVAL, SIDE, TRAIN, Record
from store.tenants import bare
from trainer.publishing.pacing import slots_remedy
from trainer.settings import USUAL_SLOTS
from trainer.updates.circuit_breaker import PauseReason
from trainer.updates.training_warnings import MOST_UNTRAINED

Figure = int | float | str
NO_FIGURES: Final[Mapping[str, Figure]] = {}


class Finding(Record, frozen=True, kw_only=True):
    """A cause that keeps a policy from learning, or a policy's outlook.

    An outlook (`is_outlook`) says how many episodes can be trained, and when. `since` is when the
    cause began, if known. `remedy` is one command or setting. `needs_person` is False for an
    outlook, and if the cause passes by itself.
    """

    title: str
    since: datetime | None = None
    figures: Mapping[str, Figure] = NO_FIGURES
    remedy: str
    needs_person: bool = True
    is_outlook: bool = False


Check = Callable[[Facts], Iterable[Finding]]
# No call for SILENT is a finding. A call within RECENT shows that the proxy works, if elsewhere.
SILENT: Final = timedelta(days=1)
RECENT: Final = timedelta(minutes=5)
# A trainer first tests the model servers, and then begins its policies one by one.
STARTING: Final = timedelta(minutes=30)
# A new policy's calls may be an evaluation alone for this long.
EVALUATION_TIME: Final = timedelta(hours=1)
# Records on disk, as in the alert PawlSpoolGrows.
MOST_SPOOLED: Final = 1000
# Names listed in one text, and characters of one name.
MOST_NAMED: Final = 3
LONGEST_NAME: Final = 80

# A learner that imitates successes trains these calls, too (docs/explanation/trainer.md).
IMITATED_REASONS: Final = frozenset({"greedy", "constrained_sampling"})
# Failures of serving, which also count in evaluation.
BROKEN_REASONS: Final = frozenset({"incomplete", "error_reply"})
# The remedy for each `proxy.trainable.Reason`.
REMEDIES: Final[Mapping[str, str]] = {
    "incomplete": "raise the client's timeout, or send less at once: calls break off before their"
    " reply has ended",
    "error_reply": "ask once with curl, and read the model server's log: it answers with errors",
    "side": "nothing to do: calls that an agent's program makes beside its work, such as titles,"
    " are not trained",
    "not_text": "send text alone: calls with images, sounds or files are not trained",
    "no_token_ids": "serve the policy with vLLM, which returns token ids (return_token_ids). If it"
    " is, vLLM gave none for these requests: messages that chat completions cannot express, or that"
    " vLLM refuses as chat completions (its log says why), and background responses"
    " (docs/decisions/009-messages-and-responses.md)",
    "length_mismatch": "start vLLM with --logprobs-mode processed_logprobs, and nothing that"
    " changes its replies before the proxy",
    "impossible_logprobs": "start vLLM with --logprobs-mode processed_logprobs",
    "usage_mismatch": "let nothing change the server's replies before the proxy",
    "empty": "raise the client's max_tokens: replies have no token",
    "several_choices": "ask for one choice: n = 1",
    "unreadable_sampling": "leave out fields that the API does not define; `sampling` in `pawl"
    " export` names them (docs/explanation/trainable.md)",
    "greedy": "ask with temperature = 1 (ChatOpenAI(temperature=1), ModelSettings(temperature=1);"
    " Aider: use_temperature: 1.0 in .aider.model.settings.yml), or set explore ="
    " { share = 0.1, temperature = 0.7 } in PAWL_POLICIES",
    "reshaped_distribution": "leave out logits_processors, vllm_xargs, best_of, beam search and"
    " thinking budgets",
    "constrained_sampling": "set PAWL_TOOL_PARSER to the server's --tool-call-parser; else make"
    " tools not strict (Agents SDK: @function_tool(strict_mode=False))",
    "unknown_policy": "ask for the policy by its name, or for one of its versions",
    "fixed_policy": "set trained = true in PAWL_POLICIES",
    "nested_too_deep": "send less deeply nested JSON",
    "reply_too_long": "ask for shorter replies, or raise PAWL_IN_FLIGHT_MB and PAWL_MAX_REPLY_MB",
    "redacted": "narrow the rules of PAWL_REDACTION: redacted calls are not trained",
}
# What calls that cannot be trained for a reason do, in a finding's title; those with any other
# reason "cannot be trained".
SYMPTOMS: Final[Mapping[str, str]] = {
    "greedy": "are asked at temperature 0, and sample nothing",
    "incomplete": "broke off",
    "error_reply": "got an error",
    "no_token_ids": "have no token ids",
}
PAUSE_REMEDIES: Final[Mapping[PauseReason, str]] = {
    "failed": "read why in the trainer's log (training_paused)",
    "out_of_memory": "give the trainer more memory: `pawl plan` says what the model takes",
    "drift": "set PAWL_DEFAULT_TEMPERATURE, PAWL_DEFAULT_SAMPLING and PAWL_TOOL_PARSER to what the"
    " model server uses",
    "rejected": "read in the controller's log how the model server serves what is trained"
    " (version_rejected)",
    "server": "start the model server as docs/howto/operate.md says; the trainer's log has what it"
    " does wrong (self_test)",
    "unpublished": "start `pawl controller`, or read in its log why the version waits"
    " (version_waits); `pawl policies rollback` gives it up",
    "server_away": "start the model server; the trainer tests it, and goes on by itself",
    "teacher": "start the teacher, or correct [teacher] in the recipe: the trainer's log says what"
    " is wrong (training_paused); the trainer tests it, and goes on by itself",
    "no_slot": f"a version gives its slot up within {LONGEST_KEPT_S:g} s, and the trainer goes on"
    " by itself; to wait less, set PAWL_ADAPTER_SLOTS higher and start Pawl again",
}


def of_each_policy(check: Callable[[Facts, PolicyFacts], Finding | None]) -> Check:
    """Turn a check of one policy into a check of all policies."""

    def checked(facts: Facts) -> Iterator[Finding]:
        for policy in facts.policies:
            finding = check(facts, policy)
            if finding is not None:
                yield finding

    return checked


def list_names(names: Iterable[str]) -> str:
    """Return the first names as a text, with the number of the others."""
    # Clients choose many of the names: cut and escape them.
    every = [
        name if name.isprintable() and len(name) <= LONGEST_NAME else f"{name!r:.80}"
        for name in names
    ]
    more = f" and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else ""
    return ", ".join(every[:MOST_NAMED]) + more


# Settings, database and disks


def unusable_files(facts: Facts) -> Iterator[Finding]:
    """Find settings whose file cannot be used; harmless if the process that needs it answers."""
    for setting, why in facts.unusable.items():
        process = facts.proxy if setting == "PAWL_UPSTREAMS" else facts.trainer
        yield Finding(
            title=f"{setting} cannot be used",
            figures={"error": why},
            remedy="correct what the error names, here or where the process runs",
            needs_person=not process.answers,
        )


def missing_key(facts: Facts) -> Iterator[Finding]:
    """Find that the proxy refuses PAWL_API_KEY; a person is needed if evaluations use the key."""
    if facts.proxy.asks_key:
        evaluates = any(
            policy.recipe is not None and policy.recipe.publish.mode == "evaluated"
            for policy in facts.policies
        )
        yield Finding(
            title="The proxy refuses PAWL_API_KEY: its metrics are not read",
            figures={"address": facts.proxy.address},
            remedy="set PAWL_API_KEY to a key with the scope read (`pawl keys create doctor"
            " --scope read`), or make a file of that name in PAWL_SECRETS_DIR",
            needs_person=evaluates,
        )


def database_away(facts: Facts) -> Iterator[Finding]:
    """Find a database that cannot be used, or was too slow to answer all questions."""
    if facts.database is not None and facts.proxy.ready.database == "up":
        yield Finding(
            title="The database cannot be used from here, while the proxy says that its own is up",
            figures={"error": facts.database},
            remedy="set DATABASE_URL, or PAWL_DATA_DIR, to what the proxy has; if it is the same "
            "database, mend what the error names",
        )
    elif facts.database is not None:
        waits = ": records wait on disk, and nothing is trained" if facts.proxy.answers else ""
        yield Finding(
            title=f"The database cannot be used{waits}",
            figures={"error": facts.database},
            remedy="start PostgreSQL, or correct DATABASE_URL; without tables run `pawl migrate`",
        )
    if facts.is_late:
        yield Finding(
            title="The database took too long: some policies and calls were not checked",
            figures={"policies_looked_at": len(facts.policies)},
            remedy="ask again when the database has less to do",
        )


def all_away(facts: Facts) -> Iterator[Finding]:
    """Find that nothing answers: neither the database, nor a process, nor a model server."""
    parts = [one.why_not for one in (facts.proxy, facts.trainer, facts.controller)]
    parts += [server.why_not for server in facts.servers]
    if facts.database is not None and None not in parts:
        yield Finding(
            title="Pawl does not run here",
            figures={"error": facts.database},
            remedy="run `pawl up`; if Pawl runs elsewhere, set PAWL_ADMIN_LISTEN,"
            " PAWL_TRAINER_LISTEN, PAWL_CONTROLLER_LISTEN and DATABASE_URL to its addresses",
        )


def full_storage(facts: Facts) -> Iterator[Finding]:
    """Find disks nearly full, and records lost, refused, stuck, or many that wait on disk."""
    for disk in facts.disks:
        if disk.free_gib < DISK_GIB:
            yield Finding(
                title=f"The disk of {disk.folder} is nearly full",
                figures={"free_gib": round(disk.free_gib, 2)},
                remedy=f"free space there, or set {disk.setting} to a folder on another disk",
            )
    proxy, drain = facts.proxy, facts.proxy.ready.drain
    outage_s = proxy.ready.recording_outage_s
    if outage_s > 0:
        yield Finding(
            title="Records are being lost: the spool's disk takes no more",
            since=facts.now - timedelta(seconds=outage_s),
            figures={"lost": int(proxy.value("pawl_records_dropped_total") or 0)},
            remedy="free space on the disk of PAWL_SPOOL_DIR",
        )
    spooled = int(proxy.value("pawl_records_spooled") or drain.held)
    if facts.database is None and (drain.state == "stuck" or spooled > MOST_SPOOLED):
        yield Finding(
            title="Records wait on disk and are not stored",
            since=facts.now - timedelta(seconds=drain.for_s),
            figures={"waiting": spooled, "reason": drain.reason or "unknown"},
            remedy="read the reason with `pawl spool`; many records need a faster database",
        )
    if facts.letters:
        yield Finding(
            title="The database refused records, which are kept as dead letters",
            figures={"dead_letters": facts.letters},
            remedy="read why with `pawl spool`, then `pawl spool --replay`",
        )


# Traffic


def proxy_away(facts: Facts) -> Iterator[Finding]:
    """Find a proxy that has no worker, or does not answer while there are no recent calls."""
    last = facts.last_call_at
    if not facts.proxy.answers and (last is None or facts.now - last > RECENT):
        yield Finding(
            title="The proxy does not answer",
            since=last,
            figures={"address": facts.proxy.address, "error": facts.proxy.why_not or ""},
            remedy="start `pawl proxy` (or `pawl up`), or set PAWL_ADMIN_LISTEN to its address",
        )
    elif facts.proxy.ready.workers and "no worker" in facts.proxy.ready.status:
        yield Finding(
            title="No worker of the proxy takes calls",
            remedy="read in the proxy's log why the workers end",
        )


def server_away(facts: Facts) -> Iterator[Finding]:
    """Find model servers that do not answer, and base models that no server has."""
    for server in facts.servers:
        if server.why_not is not None:
            yield Finding(
                title=f"The model server at {server.url} does not answer",
                figures={"error": server.why_not},
                remedy="start vLLM, or correct PAWL_UPSTREAM_URL",
            )
    listed = {
        name
        for server in facts.servers
        for name, model in server.models.items()
        if not model.get("parent")
    }
    for base in sorted({policy.about.base for policy in facts.policies} - listed if listed else ()):
        names = list_names(policy.name for policy in facts.policies if policy.about.base == base)
        yield Finding(
            title=f"The model server does not have {base}, the base model of {names}",
            figures={"models": list_names(sorted(listed))},
            remedy=f"start vLLM with --served-model-name {base}, or correct PAWL_UPSTREAM_URL",
        )


def trainer_away(facts: Facts) -> Iterator[Finding]:
    """Find that no trainer runs, that it loads its model, or that none works on some policies.

    A trainer runs if its port answers, or if the lock of a policy is held in the database; it works
    on the policies whose locks are held. `paused_training` finds policies that the trainer gave up.
    """
    trained = [policy.about.trained_at for policy in facts.policies]
    since = max((at for at in trained if at is not None), default=None)
    left = facts.trainer.values("pawl_policy_left")
    if facts.trainer.answers or any(policy.about.is_held for policy in facts.policies):
        idle = [p.name for p in facts.policies if not p.about.is_held and not left.get(p.name)]
        if idle or facts.unbegun:
            started_s = facts.trainer.value("process_start_time_seconds") or 0.0
            is_starting = facts.now.timestamp() - started_s < STARTING.total_seconds()
            yield Finding(
                title=f"No trainer works on {list_names([*idle, *facts.unbegun])}",
                since=since if idle else None,
                remedy="wait: the trainer has just started, and begins one policy after the other"
                if is_starting
                else "read why in the trainer's log (trainer_waits); PAWL_POLICY, if set, and"
                " PAWL_POLICIES must name all policies that it is to train",
                needs_person=not is_starting,
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
    )


def no_calls(facts: Facts) -> Iterator[Finding]:
    """Find that no call was recorded for a day, and whether callers lack a key."""
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
    )


def unmatched_feedback(facts: Facts) -> Iterator[Finding]:
    """Find that some feedback is about calls or episodes that were never recorded."""
    feedback = facts.unmatched
    if feedback.statements:
        target = list_names([bare(feedback.target or "")])
        yield Finding(
            title="Feedback is about calls or episodes that were never recorded",
            since=feedback.since,
            figures={"statements": feedback.statements, feedback.kind or "target": target},
            remedy="send the `id` of the reply that the agent got as `response`, or the name that"
            " the run's calls had as `episode` (docs/howto/rewards.md)",
        )


def unanswered_calls(facts: Facts) -> Iterator[Finding]:
    """Find that many calls ask for models that no policy answers."""
    kinds = [one for one in facts.calls if one.policy is None]
    calls, every = sum(one.calls for one in kinds), sum(one.calls for one in facts.calls)
    if not calls or calls <= MOST_UNTRAINED * every:
        return
    models = Counter[str]()
    for one in kinds:
        models[one.model or "(none named)"] += one.calls
    known = list_names([*(policy.name for policy in facts.policies), *facts.unbegun])
    asked = list_names(name for name, _ in models.most_common())
    yield Finding(
        title=f"Calls ask for {asked}, and no policy answers that",
        since=min(one.first_at for one in kinds),
        figures={"unanswered": calls, "calls": every, "policies": known or "none"},
        remedy=f'let the agent ask for model = "{facts.policies[0].name}", or add'
        " models = [...] to the policy in PAWL_POLICIES"
        if facts.policies
        else "start `pawl trainer`, which begins the policy",
        needs_person=calls == every,
    )


# Calls and episodes that cannot be trained


def broken_calls(facts: Facts) -> Iterator[Finding]:
    """Find policies with many calls that break off or get an error, evaluation included."""
    for name in sorted({one.policy for one in facts.calls if one.policy is not None}):
        own = [one for one in facts.calls if one.policy == name]
        yield from _many_bad_calls(name, own, [one for one in own if one.reason in BROKEN_REASONS])


def untrainable_calls(facts: Facts) -> Iterator[Finding]:
    """Find policies with many complete calls that cannot be trained."""
    trained = {policy.name: policy for policy in facts.policies}
    kinds = [
        one
        for one in facts.calls
        if one.policy is not None and one.split == TRAIN and one.reason != SIDE
    ]
    # Other policies are reported only if no call was for a policy to train.
    answered = {one.policy for one in kinds if one.policy is not None}
    for name in sorted(answered & trained.keys() or answered):
        recipe = trained[name].recipe if name in trained else None
        imitates = recipe is not None and recipe.imitation_rule is not None
        expected = {None, *BROKEN_REASONS, *(IMITATED_REASONS if imitates else ())}
        own = [one for one in kinds if one.policy == name]
        yield from _many_bad_calls(name, own, [one for one in own if one.reason not in expected])


def _many_bad_calls(name: str, counts: list[CallCount], bad: list[CallCount]) -> Iterator[Finding]:
    """Find that more than a fifth of a policy's newest calls are bad."""
    every, calls = sum(one.calls for one in counts), sum(one.calls for one in bad)
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
        f" {SYMPTOMS.get(reason, 'cannot be trained')}",
        since=min(one.first_at for one in bad if one.reason == reason),
        figures=dict(figures.most_common()),
        # A reason that another version of Pawl wrote may be unknown here.
        remedy=REMEDIES.get(reason, "docs/explanation/trainable.md says what each reason means"),
        needs_person=2 * calls > every,
    )


def only_evaluation(facts: Facts) -> Iterator[Finding]:
    """Find that all calls are of the split `eval`, which is never trained on."""
    if facts.calls and all(one.split == EVAL for one in facts.calls):
        began = min(one.first_at for one in facts.calls)
        yield Finding(
            title="Only evaluation arrives, which is never trained on",
            since=began,
            figures={"calls": sum(one.calls for one in facts.calls)},
            remedy="let the agent work without the header x-pawl-split, on tasks that do not begin"
            " as PAWL_EVAL_TASKS says",
            needs_person=facts.now - began > EVALUATION_TIME,
        )


def too_long_contexts(facts: Facts) -> Iterator[Finding]:
    """Find that the model server accepts calls too long for the trainer's memory."""
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
        )


def spinning_threads(facts: Facts) -> Iterator[Finding]:
    """Find environment variables of this shell that make Pawl's threads spin while they wait."""
    for name, value in facts.spinning.items():
        yield Finding(
            title=f"{name}={value:.40} makes waiting threads take cores from other processes",
            remedy=f"unset {name} where `pawl up` was started, and start it again",
            needs_person=False,
        )


def controller_away(facts: Facts) -> Iterator[Finding]:
    """Find that the controller does not answer; a person is needed if a trainer runs.

    A person is also needed while a decision about a version is pending.
    """
    if facts.controller.answers:
        return
    is_needed = facts.trainer.answers or any(
        policy.waits is None
        and policy.standing is not None
        and (policy.standing.canary or policy.standing.candidate)
        for policy in facts.policies
    )
    yield Finding(
        title="The controller does not answer",
        figures={"address": facts.controller.address, "error": facts.controller.why_not or ""},
        remedy="start `pawl controller` (or `pawl up`): it loads new versions, before which no"
        " further update is made, and decides about them",
        needs_person=is_needed,
    )


def paused_training(facts: Facts) -> Iterator[Finding]:
    """Find policies that a running trainer gave up, or whose training is paused."""
    policies = {policy.name: policy for policy in facts.policies}
    # Without the database the policies to train are unknown, so all are shown.
    all_are_shown = facts.tenant is None and (facts.database is not None or facts.is_late)
    for name, value in facts.trainer.values("pawl_policy_left").items():
        if value and (all_are_shown or name in policies):
            yield Finding(
                title=f"{name}: the trainer stopped working on it after a failure",
                remedy="read why in the trainer's log (policy_left)",
            )
    for reason, remedy in PAUSE_REMEDIES.items():
        for name, value in facts.trainer.values("pawl_trainer_paused", reason=reason).items():
            if value and (all_are_shown or name in policies):
                yield Finding(
                    title=f"{name}: training is paused ({reason})",
                    since=policies[name].about.trained_at if name in policies else None,
                    figures={"reason": reason},
                    remedy=remedy,
                    # In these cases the trainer goes on by itself.
                    needs_person=reason not in ("server_away", "no_slot"),
                )


def no_slot(facts: Facts) -> Iterator[Finding]:
    """Find that all adapter slots of the model server are taken, so that no update begins."""
    slots = min((one.slots for one in facts.servers if one.slots is not None), default=USUAL_SLOTS)
    for policy in facts.policies:
        held = [one.at_most_s for one in policy.kept if not one.may_be_unloaded]
        if policy.live is None or not held:
            continue
        live = replace(policy.live, kept=len(held))
        if free_slots(live, slots) <= 0:
            yield Finding(
                title=f"{policy.name}: no update begins, as all {slots} adapter slots of the model"
                " server are taken, by versions with episodes under way",
                figures={"taken": live.total, "slots": slots, "kept_for_episodes": live.kept},
                remedy=f"wait for at most {max(1, round(min(held)))} s, or {slots_remedy(slots)}",
                needs_person=live.serving + live.held >= slots,
            )
