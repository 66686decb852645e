"""`pawl policies list` and `show`: policies with their models, and versions with their rewards."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import typer
from msgspec import UNSET, UnsetType
from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.common import (
    AsJson,
    OfTenant,
    PolicyName,
    cell,
    fail,
    make_table,
    run_with_engine,
    write_lines,
)
from pawl.commands.policy_files import check, export_version, import_version
from pawl.commands.policy_traffic import freeze, promote, retrain, rollback
from pawl.doctor.outlook import outlook_of
from pawl.operator_moves import approval_event, policy_versions
from pawl.settings import read_settings
from store.claim_query import waiting_episodes, waiting_updates
from store.policy_table import PolicyTable, open_policies
from store.read.evaluations import rewards_by_version
from store.read.health import episode_counts
from store.read.lineage import rewards_of
from store.records import Arm, Record
from store.tenants import DEFAULT
from store.version_queries import list_events, list_versions
from store.versions import Actor, PolicyState, PolicyVersion
from trainer.errors import FileMissing, FilesUnread, RecipeError
from trainer.publishing.adapters import translate_errors, why_altered
from trainer.recipes.recipe import load_recipe
from trainer.settings import TrainerSettings
from trainer.updates.claiming import claim_rule
from trainer.updates.training_warnings import training_warnings

# `unlisted`: the policy has versions, but is not in the file of policies.
Kind = Literal["trained", "fixed", "unlisted"]
# Only the newest events are shown.
MAX_EVENTS: Final = 100
# The columns of optional figures.
MEASURED_COLUMNS: Final = {
    "share": "share",
    "live_reward": "live reward",
    "live_episodes": "of episodes",
    "kl_to_base": "KL to base",
    "tokens_per_second": "tokens/s",
    "mfu": "MFU",
    "idle_share": "idle",
}

app = typer.Typer(
    no_args_is_help=True,
    help="Show policies and versions; export, import, promote, roll back or retrain them.",
)


@app.command("list")
def list_policies(tenant: OfTenant = None, as_json: AsJson = False) -> None:
    """List the policies: what each answers, its recipe, and the version that serves.

    They are those of PAWL_POLICIES, and those that have versions in the database (DATABASE_URL,
    or the embedded one in PAWL_DATA_DIR); nothing is changed in it. A policy is `trained`,
    `fixed`, or `unlisted`: it has versions, and the file does not name it. `waiting` are the
    episodes with a reward that the policy may claim; `explore` says in which share of its episodes
    calls are explored, and how.

    Status 2: PAWL_POLICIES cannot be used.
    """
    settings = read_settings(TrainerSettings)
    policies = open_policies(settings.policies)
    lines = run_with_engine(
        lambda engine: read_policy_lines(engine, policies, settings.recipe, tenant)
    )
    write_lines(lines, policies_table, as_json=as_json)


@app.command()
def show(
    name: PolicyName,
    events: Annotated[
        bool, typer.Option("--events", help="Show how the versions got their states, and why.")
    ] = False,
    tenant: OfTenant = None,
    as_json: AsJson = False,
) -> None:
    """Show a policy's versions: their states, and the rewards of their evaluation.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR); nothing is changed in
    it. `mean` is the mean reward of the version's episodes of the `eval` split; `low` and `high`
    are its 95 % interval by task: Wilson's where all rewards are 0 or 1, else Student's. `live
    reward` is the mean reward of the version's episodes outside evaluation. `tokens/s` are the
    distinct tokens trained per second, `MFU` is the share of the GPU's peak, and `idle` the share
    of time since the update before in which the model computed nothing. The serving version's line
    has `explore`, if PAWL_POLICIES says that the policy explores; `warnings`, which say why
    episodes are not trained and what to change; and `outlook`, which says how many episodes count
    towards an update, and when the next one comes. New episodes begin with the versions that have
    an `arm`: the one that serves, a canary and the control with their `share`. An `unloaded`
    version is on no model server. If a version waits for `pawl policies promote`, its line says
    why, with the evidence.

    With --events it shows the newest changes of their states instead: each with its reason, who
    made it, and, as JSON, the evidence that it rests on.

    Status 2: there is no such policy, or PAWL_POLICIES or the recipe cannot be used.
    """
    settings = read_settings(TrainerSettings)
    policies = open_policies(settings.policies)
    if events:
        changes = run_with_engine(lambda engine: read_event_lines(engine, name, tenant))
        write_lines(changes, events_table, as_json=as_json)
    else:
        try:
            lines = run_with_engine(
                lambda engine: read_version_lines(engine, name, policies, settings.recipe, tenant)
            )
        except RecipeError as error:
            fail(str(error))
        write_lines(lines, versions_table, as_json=as_json)


app.command()(check)
app.command("export")(export_version)
app.command("import")(import_version)
for verb in (promote, rollback, retrain, freeze):
    app.command()(verb)


class PolicyLine(Record, frozen=True, kw_only=True):
    """One policy; the fields are in output order.

    The policy answers calls for `models`, and calls of `agents` for `base`. `serving` is the
    serving version, `versions` counts versions with an adapter, and `waiting` counts episodes with
    a reward that it may claim. `explore` is set only if the policy explores, `tenant` only if it is
    not the default one.
    """

    name: str
    kind: Kind
    base: str
    agents: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    recipe: str | None = None
    serving: str | None = None
    versions: int = 0
    waiting: int = 0
    explore: str | UnsetType = UNSET
    tenant: str | UnsetType = UNSET


async def read_policy_lines(
    engine: AsyncEngine, table: PolicyTable | None, recipe: str, tenant: str | None = None
) -> list[PolicyLine]:
    """Return a record of each policy: those of the file in its order, then those only stored.

    `recipe` is for policies whose recipe the file does not name. With `tenant`, only that tenant's
    policies are returned.
    """
    async with engine.connect() as connection:
        versions = await list_versions(connection)
        waiting = await waiting_episodes(connection)
    stored: dict[str, list[PolicyVersion]] = {}
    for version in versions:
        stored.setdefault(version.name, []).append(version)
    lines = _lines_from_file(table, recipe)
    in_file = {line.name for line in lines}
    lines += [
        _line_from_store(own, table, recipe) for name, own in stored.items() if name not in in_file
    ]
    chosen = [line for line in lines if tenant in (None, line.tenant or DEFAULT)]
    return [_with_versions(line, stored.get(line.name, ()), waiting) for line in chosen]


def _lines_from_file(table: PolicyTable | None, recipe: str) -> list[PolicyLine]:
    """Return the lines of the policies in the file; `recipe` is for those that name none."""
    return [
        PolicyLine(
            name=spec.name,
            kind="trained" if spec.trained else "fixed",
            base=spec.base,
            agents=spec.agents,
            models=(spec.name, *(model for model in spec.models if model != spec.name)),
            recipe=(spec.recipe or recipe) if spec.trained else None,
            # Version 0 serves even before a trainer has begun the policy.
            serving=f"{spec.name}@0" if spec.trained else None,
            explore=UNSET if spec.explore is None else str(spec.explore),
            tenant=UNSET if spec.tenant == DEFAULT else spec.tenant,
        )
        for spec in (() if table is None else table.specs)
    ]


def _line_from_store(
    versions: Sequence[PolicyVersion], table: PolicyTable | None, recipe: str
) -> PolicyLine:
    """Return the line of a policy that is only in the store.

    It is `trained` if there is no file of policies, else `unlisted`.
    """
    name, base = versions[0].name, versions[0].served_name
    tenant = UNSET if versions[0].tenant == DEFAULT else versions[0].tenant
    if table is not None:
        return PolicyLine(name=name, kind="unlisted", base=base, tenant=tenant)
    return PolicyLine(
        name=name, kind="trained", base=base, models=(name,), recipe=recipe, tenant=tenant
    )


def _with_versions(
    line: PolicyLine, own: Sequence[PolicyVersion], waiting: Mapping[str, int]
) -> PolicyLine:
    serving = next((f"{v.name}@{v.version}" for v in own if v.state == "serving"), line.serving)
    return msgspec.structs.replace(
        line,
        serving=None if line.kind == "fixed" else serving,
        versions=sum(version.version > 0 for version in own),
        waiting=waiting.get(line.name, 0),
    )


def policies_table(lines: Sequence[PolicyLine]) -> Table:
    """Return a table, with the columns `explore` and `tenant` only if a line has them."""
    names = list(PolicyLine.__struct_fields__)
    for name in ("explore", "tenant"):
        if all(getattr(line, name) is UNSET for line in lines):
            names.remove(name)
    rows = ([getattr(line, name) for name in names] for line in lines)
    return make_table(names, rows, right=("versions", "waiting"))


class VersionLine(Record, frozen=True, kw_only=True):
    """One version of a policy; the fields are in output order.

    Of the `eval_episodes`, `scored` have a reward; `low` to `high` is the 95 % interval of their
    `mean`. `live_reward` is the mean reward of the `live_episodes`, the other scored episodes that
    began with the version. `files_deleted` means that the adapter was deleted, as no request could
    use it any more; `altered`, that its files on this machine are not those that were written;
    `unread`, that they cannot be read for now; `ended`, that the policy's line started again before
    this version (`pawl policies retrain`). `kl_to_base` is the distance from the base model in nats
    a token, on the version's training data. Of its update, `tokens_per_second` counts distinct
    tokens, `mfu` is the share of the GPU's peak, and `idle_share` the share of the time since the
    previous update in which the model computed nothing. `arm` and `share` are set only if new
    episodes begin with the version. `waits` and `evidence` are set on a version that waits for a
    person. Only the serving version has `explore`, if the policy explores, `warnings` (why episodes
    are not trained, and what to change) and, if the policy is trained, `outlook`.
    """

    version: str
    state: PolicyState
    arm: Arm | UnsetType = UNSET
    share: float | UnsetType = UNSET
    unloaded: bool = False
    eval_episodes: int = 0
    scored: int = 0
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    ended: bool = False
    files_deleted: bool = False
    altered: bool = False
    unread: bool = False
    live_episodes: int | UnsetType = UNSET
    live_reward: float | UnsetType = UNSET
    kl_to_base: float | UnsetType = UNSET
    tokens_per_second: float | UnsetType = UNSET
    mfu: float | UnsetType = UNSET
    idle_share: float | UnsetType = UNSET
    explore: str | UnsetType = UNSET
    waits: str | UnsetType = UNSET
    evidence: dict[str, Any] | UnsetType = UNSET
    warnings: tuple[str, ...] | UnsetType = UNSET
    outlook: str | UnsetType = UNSET


async def read_version_lines(
    engine: AsyncEngine,
    name: str,
    policies: PolicyTable | None,
    recipe: str,
    tenant: str | None = None,
) -> list[VersionLine]:
    """Return a record of each version of a policy, oldest first, for the table and for JSON.

    `policies` is the file of policies; `recipe` is for a policy whose recipe it does not name.

    Raises:
        UnknownPolicy: there is no such policy, or it is another tenant's.
        RecipeError: the policy's recipe cannot be used.
    """
    spec = None if policies is None else policies.policy_named(name)
    async with engine.connect() as connection:
        versions = await policy_versions(connection, name, tenant)
        curve = {point.version: point for point in await rewards_by_version(connection, name)}
        live, _ = await rewards_of(connection, name, [one.version for one in versions], None)
        waits = {one.version: await approval_event(connection, one) for one in versions}
        # Without a file, each policy is trained.
        is_trained = policies is None or (spec is not None and spec.trained)
        problems = await training_warnings(connection, name) if is_trained else {}
        warnings = tuple(map(str, problems.values()))
        outlook = None
        if is_trained:
            now = datetime.now(UTC)
            rule = claim_rule(load_recipe((spec and spec.recipe) or recipe), name)
            outlook = outlook_of(
                await episode_counts(
                    connection, name, now, calls_are_paid=rule.call_rewards_after_s is not None
                ),
                rule,
                await waiting_updates(connection, rule),
                now,
                is_untrained=all(version.version == 0 for version in versions),
            )
    explore = UNSET if spec is None or spec.explore is None else str(spec.explore)
    lines = []
    for version in versions:
        line = VersionLine(
            version=f"{name}@{version.version}",
            state=version.state,
            arm=arm_of(version) or UNSET,
            share=UNSET if version.share is None else version.share,
            unloaded=version.unloaded,
            explore=explore if version.state == "serving" else UNSET,
            warnings=(version.state == "serving" and warnings) or UNSET,
            outlook=UNSET if outlook is None or version.state != "serving" else str(outlook),
            files_deleted=version.files_deleted,
            ended=version.ended,
            kl_to_base=UNSET if version.kl_to_base is None else version.kl_to_base,
            **_file_fields(version),
        )
        if (event := waits[version.version]) is not None:
            evidence = dict(event.evidence or {})
            line = msgspec.structs.replace(line, waits=event.reason, evidence=evidence)
        line = msgspec.structs.replace(line, **version.throughput)
        if (own := live.get(version.version)) is not None and own.scored:
            line = msgspec.structs.replace(line, live_episodes=own.scored, live_reward=own.mean)
        if (point := curve.get(version.version)) is not None:
            evaluated = msgspec.structs.asdict(point)
            shown = {name: evaluated[name] for name in ("scored", "mean", "low", "high")}
            line = msgspec.structs.replace(line, eval_episodes=point.episodes, **shown)
        lines.append(line)
    return lines


def arm_of(version: PolicyVersion) -> Arm | None:
    """Return the arm of new episodes that begin with a version, or None if none do (pure)."""
    match version.state:
        case "serving" | "canary":
            return version.state
    return "control" if version.share is not None else None


def _file_fields(version: PolicyVersion) -> dict[str, Any]:
    """Return `altered` or `unread` for a version's files; no field if this machine lacks them."""
    if version.adapter_path is None:
        return {}
    folder = Path(version.adapter_path)
    try:
        with translate_errors(folder):
            folder.stat()
        return {"altered": why_altered(version) is not None}
    except FileMissing:
        return {}
    except FilesUnread:
        return {"unread": True}


def versions_table(lines: Sequence[VersionLine]) -> Table:
    """Return a table of versions, with notes (exploring, waiting, warnings, outlook) below it."""
    explore = [f"explores: {line.explore}" for line in lines if line.explore is not UNSET]
    notes = explore + [f"{line.version}: {line.waits}" for line in lines if line.waits is not UNSET]
    notes += [why for line in lines if line.warnings is not UNSET for why in line.warnings]
    notes += [line.outlook for line in lines if line.outlook is not UNSET]
    numbers = ["eval episodes", "scored", "mean reward", "95 % interval"]
    measured = {
        figure: column
        for figure, column in MEASURED_COLUMNS.items()
        if any(getattr(line, figure) is not UNSET for line in lines)
    }
    numbers += measured.values()
    names = ["version", "state", *numbers]
    rows = []
    for line in lines:
        interval = None if line.low is None else f"{cell(line.low)} to {cell(line.high)}"
        more = {
            "control": line.arm == "control",
            "unloaded": line.unloaded,
            "ended": line.ended,
            "deleted": line.files_deleted,
            "altered": line.altered,
            "unread": line.unread,
        }
        state = (line.state, *(word for word, is_so in more.items() if is_so))
        reward = (line.eval_episodes, line.scored, line.mean, interval)
        figures = (getattr(line, figure) for figure in measured)
        rows.append((line.version, state, *reward, *figures))
    return make_table(names, rows, right=numbers, whole=names, caption="\n".join(notes) or None)


class StateChangeLine(Record, frozen=True, kw_only=True):
    """One change of a version's state; the fields are in output order.

    `evidence` is set only if the change was decided by it.
    """

    at: datetime
    version: str
    from_state: PolicyState | None
    to_state: PolicyState
    reason: str
    actor: Actor
    evidence: dict[str, Any] | UnsetType = UNSET


async def read_event_lines(
    engine: AsyncEngine, name: str, tenant: str | None = None
) -> list[StateChangeLine]:
    """Return a record of each of the newest state changes of a policy's versions, oldest first.

    Raises:
        UnknownPolicy: there is no such policy, or it is another tenant's.
    """
    async with engine.connect() as connection:
        await policy_versions(connection, name, tenant)
        events = await list_events(connection, name, most=MAX_EVENTS)
    return [
        StateChangeLine(
            at=event.at,
            version=f"{name}@{event.version}",
            from_state=event.from_state,
            to_state=event.to_state,
            reason=event.reason,
            actor=event.actor,
            evidence=UNSET if event.evidence is None else dict(event.evidence),
        )
        for event in reversed(events)
    ]


def events_table(lines: Sequence[StateChangeLine]) -> Table:
    """Return a table of state changes, without the evidence, which only the JSON lines have."""
    rows = []
    for line in lines:
        before = "" if line.from_state in (None, line.to_state) else f"{line.from_state} → "
        state = before + line.to_state
        at = f"{line.at.astimezone():%Y-%m-%d %H:%M:%S}"
        rows.append((at, line.version, state, line.actor, line.reason))
    names = ("at", "version", "state", "by", "why")
    return make_table(names, rows, whole=names[:-1])
