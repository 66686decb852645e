"""Define `pawl policies promote`, `rollback`, `retrain` and `freeze`: move traffic by hand."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final, TypeVar
from uuid import UUID

import msgspec
import typer
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pawl.commands.common import OfTenant, fail, in_database, with_engine, with_zone
from pawl.commands.policy_lookup import PolicyName, chosen_version, numbered, policy_versions
from pawl.controller.evidence import OnTrial
from pawl.controller.rollback import (
    Loaded,
    RollbackTarget,
    call_back,
    load_again,
    make_room,
    roll_back_to,
)
from pawl.settings import ControllerSettings, read_settings
from store import retraining, version_states
from store.errors import NotGated, StateChanged, StoreError, UnknownNames, UnknownPolicy
from store.read.gates import gated
from store.retraining import Retrained
from store.selecting import Selection, named, selected
from store.tenants import scoped
from store.version_queries import numbered_version, was_called_back
from store.version_states import change_state, lock_policies
from store.versions import Actor, PolicyState, PolicyVersion
from trainer.errors import TrainerError
from trainer.publishing.model_server import Replicas
from trainer.publishing.sources import others_files

Result = TypeVar("Result")
VersionName = Annotated[
    str, typer.Argument(metavar="NAME[@N]", help="The policy, or a version.", show_default=False)
]
Reason = Annotated[str, typer.Option(help="Why, for the policy's events.")]
BY_HAND: Final = "by hand"
OPERATOR: Final[Actor] = "operator"
# The states of versions that every model server has loaded, and that do not serve.
LOADED: Final[tuple[PolicyState, ...]] = ("candidate", "canary", "ready", "published")
# Which of them is meant where none is named: the one that is tried, or waits for it.
NEXT: Final[tuple[PolicyState, ...]] = ("canary", "candidate", "ready")
# The fields of a query; those of a time end with `since` or `before`.
FIELDS: Final = (
    *("episode", "task", "prefix", "agent", "key"),
    *("since", "before", "scored-since", "scored-before"),
)
_FIELD: Final = "|".join(FIELDS)
_BEGINS: Final = re.compile(rf"(?:{_FIELD})=")
_NEXT: Final = re.compile(rf",(?=(?:{_FIELD})=)")


def promote(name: VersionName, reason: Reason = BY_HAND, tenant: OfTenant = None) -> None:
    """Give a version the traffic now: by default the one that is tried, or waits to be.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). New episodes begin with
    the version; those under way keep theirs. It must be loaded: its state is `candidate`, `canary`,
    `ready` or `published`. A version that was retired and called back may be on no server yet, and
    is loaded first: run this where the model servers (PAWL_UPSTREAM_URL, PAWL_REPLICA_URLS) and
    the adapters' files can be reached. The next candidate is judged as before; `pawl policies
    freeze` keeps the traffic where it is.

    Status 2: there is no such version, or it cannot serve.
    """
    chosen = with_servers(
        lambda engine, replicas: promote_by_hand(engine, replicas, name, reason, tenant)
    )
    print(f"{chosen.served_name} serves")


def rollback(name: VersionName, reason: Reason = BY_HAND, tenant: OfTenant = None) -> None:
    """Let no new episode begin with a version: by default the one that serves.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). If the version serves,
    the one before it serves again, or the base model. For that it must be loaded: run this where
    the model servers (PAWL_UPSTREAM_URL, PAWL_REPLICA_URLS) and the adapters' files can be
    reached, as for a controller. If it cannot be loaded, the base model serves instead. Episodes
    under way keep their version, and are not trained on. Versions that were trained from it never
    serve. This cannot be undone; the adapter can be exported and imported again.

    Status 2: there is no such version, or it has no new episodes.
    """
    chosen, serves, loaded = with_servers(
        lambda engine, replicas: roll_back_by_hand(engine, replicas, name, reason, tenant)
    )
    print(f"{chosen.served_name} is rolled back")
    if serves is not None:
        print(f"{serves.served_name} serves")
    if serves is not None and loaded is not None and loaded.why_not is not None:
        print(f"{loaded.version.served_name} could not be loaded: {loaded.why_not}")


def retrain(
    name: PolicyName,
    start: Annotated[
        int, typer.Option("--from", min=0, help="Version to start at; 0: the base model.")
    ],
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="QUERY",
            help="Leave out an episode, by key or id, or those that meet all of FIELD=VALUE,...:"
            " task, prefix, agent, key, since, before, scored-since, scored-before. May be given"
            " several times.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
    reason: Reason = BY_HAND,
    tenant: OfTenant = None,
) -> None:
    """Start a policy's line of versions again at an older version, without some episodes.

    For the day on which rewards turn out to be wrong. The version gets the traffic, and all after
    it end: nothing is trained from them, and they never serve again. The episodes that these
    consumed are free, and the policy's trainer trains the version on them, but for those left out,
    which no update claims any more. Episodes under way keep their version. A trainer may run
    meanwhile: an update under way is given up.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). A version that was
    retired is loaded first: run this where the model servers (PAWL_UPSTREAM_URL, PAWL_REPLICA_URLS)
    and the adapters' files can be reached.

    Status 2: there is no such version, episode or key, or the line cannot start at the version.
    """
    left_out = [read_query(query) for query in without or ()]
    retrained = with_servers(
        lambda engine, replicas: retrain_by_hand(
            engine, replicas, name, start, left_out, reason, tenant, dry_run=dry_run
        )
    )
    print(as_text(retrained))


def freeze(
    name: PolicyName,
    off: Annotated[bool, typer.Option("--off", help="Let the gate decide again.")] = False,
    reason: Reason = BY_HAND,
    tenant: OfTenant = None,
) -> None:
    """Keep a policy's traffic where it is until `--off`; only commands move it meanwhile.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). A version that is tried
    keeps its share of the new episodes; training goes on.

    Status 2: there is no such policy.
    """

    async def work(connection: AsyncConnection) -> None:
        await policy_versions(connection, name, tenant)
        await version_states.freeze(connection, name, frozen=not off, reason=reason, actor=OPERATOR)

    in_database(work)
    print(f"{name} is {'no longer ' if off else ''}frozen")


def with_servers(work: Callable[[AsyncEngine, Replicas], Awaitable[Result]]) -> Result:
    """Run `work` with the database and all replicas of the model server; return its result."""
    settings = read_settings(ControllerSettings)
    try:
        files = others_files(settings)
    except TrainerError as error:
        fail(str(error))

    async def run(engine: AsyncEngine) -> Result:
        async with Replicas(settings.server_urls, settings.adapter_slots, files) as replicas:
            return await work(engine, replicas)

    return with_engine(run)


def split_name(named: str) -> tuple[str, int | None]:
    """Return the policy and the number in `NAME@N`, or the policy and None (pure)."""
    name, at, number = named.rpartition("@")
    return (name, int(number)) if at and number.isdecimal() else (named, None)


async def promote_by_hand(
    engine: AsyncEngine,
    replicas: Replicas,
    named: str,
    reason: str,
    tenant: str | None = None,
) -> PolicyVersion:
    """Give a version the traffic, and return it; with `tenant` it must be that tenant's.

    What its trial came to so far is recorded with it, if it is tried. One that had been retired,
    and was called back to serve again, is loaded first: no replica may have it yet.

    Raises:
        UnknownPolicy: there is no such version, or none waits.
        NotGated: the version is not loaded, or cannot be, or serves already.
        StateChanged: somebody else moved it meanwhile.
    """
    name, number = split_name(named)
    async with engine.begin() as connection:
        versions = await policy_versions(connection, name, tenant)
        chosen = _next(versions) if number is None else numbered(versions, number)
        _check_can_serve(chosen)
    await load_if_called_back(engine, replicas, chosen, numbered(versions, 0))
    async with engine.begin() as connection:
        evidence = await _trial_so_far(connection, chosen)
        await lock_policies(connection, [name])
        await _check_not_moved(connection, chosen)
        await version_states.promote(
            connection, name, chosen.version, reason=reason, actor=OPERATOR, evidence=evidence
        )
    return chosen


def _next(versions: list[PolicyVersion]) -> PolicyVersion:
    for state in NEXT:
        for version in versions:
            if version.state == state:
                return version
    name = versions[0].name
    raise UnknownPolicy(
        f"no version of {name!r} is tried, or waits for it: name the one to promote, as {name}@N"
    )


def _check_can_serve(version: PolicyVersion) -> None:
    if version.state == "serving":
        raise NotGated(f"{version.name}@{version.version} serves already")
    if version.state not in LOADED:
        raise NotGated(
            f"{version.name}@{version.version} is {version.state!r}, and can only be promoted while"
            f" it is loaded ({', '.join(LOADED)}): export its adapter and import it, which makes it"
            " a version of its own"
        )


async def load_if_called_back(
    engine: AsyncEngine, replicas: Replicas, version: PolicyVersion, base: PolicyVersion
) -> None:
    """Load a version that was retired and called back on every replica that answers.

    Raises:
        NotGated: it is not there afterwards.
    """
    async with engine.connect() as connection:
        if not await was_called_back(connection, version):
            return
    await make_room(engine, replicas, version, OPERATOR)
    loaded = await load_again(replicas, RollbackTarget(version=version, base=base))
    if loaded.why_not is not None:
        raise NotGated(
            f"{version.served_name} had been retired, and could not be loaded again, so it"
            f" was not promoted: {loaded.why_not}; run this again where the model servers"
            " (PAWL_UPSTREAM_URL, PAWL_REPLICA_URLS) and the adapters' files are within reach"
        )


async def _check_not_moved(connection: AsyncConnection, chosen: PolicyVersion) -> None:
    """Check that a version has the state still in which it was found; the policy is locked."""
    now = await numbered_version(connection, chosen.name, chosen.version)
    if now is None or now.state != chosen.state:
        raise StateChanged(
            f"{chosen.name}@{chosen.version} is not {chosen.state!r} any more, so it was not"
            " promoted: look at its state (`pawl policies show`), and decide again"
        )


async def _trial_so_far(
    connection: AsyncConnection, version: PolicyVersion
) -> Mapping[str, Any] | None:
    stands = await gated(connection, version.name)
    if stands is None or stands.canary is None or stands.canary.version.version != version.version:
        return None
    trial = OnTrial(stands, stands.canary)
    return trial.evidence(await trial.decide(connection, stands.now))


async def roll_back_by_hand(
    engine: AsyncEngine,
    replicas: Replicas,
    named: str,
    reason: str,
    tenant: str | None = None,
) -> tuple[PolicyVersion, PolicyVersion | None, Loaded | None]:
    """Take the new episodes from a version, by default the one that serves.

    If it serves, what served before it is loaded first. Return the version; what serves instead, or
    None if it did not serve; and what came of loading that. With `tenant` the policy must be that
    tenant's.

    Raises:
        UnknownPolicy: there is no such version.
        NotGated: the version has no new episodes, or is the base model.
        StateChanged: somebody else moved the traffic meanwhile.
    """
    name, number = split_name(named)
    async with engine.begin() as connection:
        versions = await policy_versions(connection, name, tenant)
        if number is None:
            [chosen] = [one for one in versions if one.state == "serving"]
        else:
            chosen = numbered(versions, number)
        if chosen.state != "serving" or not chosen.version:
            await version_states.roll_back(connection, chosen, reason=reason, actor=OPERATOR)
            return chosen, None, None
        before, _ = await call_back(connection, chosen, OPERATOR)
    await make_room(engine, replicas, before.version, OPERATOR)
    loaded = await load_again(replicas, before)
    async with engine.begin() as connection:
        serves = await roll_back_to(connection, chosen, loaded, reason=reason, actor=OPERATOR)
    return chosen, serves, loaded


class BadQuery(StoreError):
    """Report a query that cannot be read; the message names the field and the remedy."""


def read_query(query: str) -> str | Selection:
    """Read an episode's key or id, or conditions `FIELD=VALUE` between commas (pure).

    A comma in a value is part of it unless a field follows.

    Raises:
        BadQuery: a value is missing or is no time, a field comes twice, or an episode's name has
            further conditions.
    """
    pairs = [("episode", query)]
    if _BEGINS.match(query):
        pairs = [one.partition("=")[::2] for one in _NEXT.split(query)]
    values: dict[str, Any] = {}
    for field, value in pairs:
        where = f"--without {query!r}: {field}"
        if not value:
            raise BadQuery(f"{where}: write {field}=VALUE, with a value")
        if field in values:
            raise BadQuery(f"{where}: it comes twice: give it once")
        values[field] = value
        if field.endswith(("since", "before")):
            try:
                values[field] = with_zone(datetime.fromisoformat(value))
            except ValueError as error:
                raise BadQuery(
                    f"{where}: {value!r} is no time: write it as 2026-11-22 or 2026-11-22T14:30,"
                    " with a zone (+01:00) or in this machine's"
                ) from error
    if "episode" not in values:
        names = {"before": "begun_before"}
        return Selection(
            **{names.get(one, one.replace("-", "_")): value for one, value in values.items()}
        )
    if len(values) > 1:
        raise BadQuery(
            f"--without {query!r}: episode: a name selects one episode: leave the other conditions"
            " away, or give a --without of their own"
        )
    return str(values["episode"])


async def retrain_by_hand(
    engine: AsyncEngine,
    replicas: Replicas,
    name: str,
    number: int,
    without: Sequence[str | Selection],
    reason: str,
    tenant: str | None = None,
    *,
    dry_run: bool = False,
) -> Retrained:
    """Start a policy's line again at a version, which is loaded first if it is on no server.

    With `tenant` the policy must be that tenant's. With `dry_run` nothing is kept.

    Raises:
        UnknownPolicy, UnknownNames: there is no such version, episode or API key.
        NotGated, StateChanged, RolledBack: the line cannot start there; the message says why.
    """
    async with engine.connect() as connection:
        versions = await policy_versions(connection, name, tenant)
        base = numbered(versions, 0)
        start = chosen_version(versions, number) if number else base
        left_out = await _episodes(connection, base.tenant, without)
        retrain = partial(
            retraining.retrain,
            policy=name,
            version=number,
            left_out=left_out,
            reason=reason,
            actor=OPERATOR,
        )
        if start.state == "retired":
            why = "it is loaded, so that the policy's line can start again at it"
            await change_state(connection, start, "published", reason=why, actor=OPERATOR)
            start = msgspec.structs.replace(start, state="published")
        if dry_run:
            return await retrain(connection)
        await connection.commit()
    await load_if_called_back(engine, replicas, start, base)
    async with engine.begin() as connection:
        return await retrain(connection)


async def _episodes(
    connection: AsyncConnection, tenant: str, without: Sequence[str | Selection]
) -> set[UUID]:
    names = [scoped(tenant, one) for one in without if isinstance(one, str)]
    chosen = await named(connection, names)
    if chosen.unknown:
        raise UnknownNames(
            f"these episodes are not recorded, and nothing was changed: {list(chosen.unknown)[:5]};"
            " correct the names, or leave them away if their calls wait in a spool"
        )
    ids = set(chosen.wholes)
    for selection in (one for one in without if isinstance(one, Selection)):
        ids |= set(await selected(connection, msgspec.structs.replace(selection, tenant=tenant)))
    return ids


def as_text(retrained: Retrained) -> str:
    """Return in words what a retraining did, or would do."""
    instead = f" in place of {retrained.served}" if retrained.served != retrained.serves else ""
    freed = ", ".join(f"{number} {why}" for why, number in sorted(retrained.freed.items()))
    text = (
        f"{retrained.serves} serves{instead}; versions ended: {retrained.ended}; episodes freed:"
        f" {freed or 'none'}; episodes left out: {retrained.left_out}"
    )
    if retrained.learned:
        text += (
            f"\n{retrained.serves} learned from {retrained.learned} of the episodes to leave out:"
            " start at an earlier version"
        )
    if retrained.max_staleness is not None and retrained.ended > retrained.max_staleness:
        text += (
            f"\nclaim.max_staleness is {retrained.max_staleness}: once the new line has so many"
            " versions, freed episodes that still wait expire; raise it until they are trained"
        )
    return text
