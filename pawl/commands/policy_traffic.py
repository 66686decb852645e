"""Define `pawl policies promote`, `rollback`, `retrain` and `freeze`: move traffic by hand."""

import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final
from uuid import UUID

import msgspec
import typer
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pawl.commands.common import OfTenant, in_database, with_engine, with_zone
from pawl.commands.policy_lookup import (
    PolicyName,
    chosen_version,
    numbered,
    policy_versions,
    shown_wait,
    why_waits,
)
from pawl.settings import ControllerSettings, read_settings
from store import retraining, version_states
from store.errors import NotGated, StateChanged, StoreError, UnknownNames, UnknownPolicy
from store.retraining import Retrained
from store.selecting import Selection, named, selected
from store.tenants import scoped
from store.version_queries import numbered_version
from store.version_states import lock_policies
from store.versions import Actor, PolicyEvent, PolicyState, PolicyVersion
from trainer.errors import UpstreamAway
from trainer.publishing.model_server import ModelServer, Replicas

VersionName = Annotated[
    str, typer.Argument(metavar="NAME[@N]", help="The policy, or a version.", show_default=False)
]
Reason = Annotated[str, typer.Option(help="Why, for the policy's events.")]
BY_HAND: Final = "by hand"
OPERATOR: Final[Actor] = "operator"
# The states of versions that may get the traffic by hand.
PROMOTABLE: Final[tuple[PolicyState, ...]] = ("loaded", "canary", "retired")
# Which version is meant where none is named: the one that is tried, or waits for it.
NEXT: Final[tuple[PolicyState, ...]] = ("canary", "loaded")
# How long an operator waits for a recalled version, and how often the model servers are asked.
LOADED_WITHIN_S: Final = 60.0
ASKED_EVERY_S: Final = 0.5
# The fields of a query; those of a time end with `since` or `before`.
FIELDS: Final = (
    *("episode", "task", "prefix", "agent", "key"),
    *("since", "before", "scored-since", "scored-before"),
)
_FIELD: Final = "|".join(FIELDS)
_BEGINS: Final = re.compile(rf"(?:{_FIELD})=")
_NEXT: Final = re.compile(rf",(?=(?:{_FIELD})=)")


def promote(
    name: VersionName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask on a terminal.")] = False,
    reason: Reason = BY_HAND,
    tenant: OfTenant = None,
) -> None:
    """Give a version the traffic now: by default the one that is tried, or waits to be.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). New episodes begin with
    the version; those under way keep theirs. If the version waits for approval, the evidence is
    shown, and a terminal is asked. A version that was unloaded is loaded by the controller or the
    trainer first: run this where the model servers (PAWL_UPSTREAM_URL, PAWL_REPLICA_URLS) answer.
    The next version is judged as before; `pawl policies freeze` keeps the traffic where it is.

    Status 1: the answer was no. Status 2: there is no such version, or it cannot serve.
    """

    async def run(engine: AsyncEngine) -> PolicyVersion:
        version, waits = await find_to_promote(engine, name, tenant)
        if waits is not None:
            print(shown_wait(waits))
            if not yes and sys.stdin.isatty():
                typer.confirm(f"Promote {version.served_name}?", abort=True)
        evidence = None if waits is None else waits.evidence
        return await promote_by_hand(engine, version, reason, evidence)

    print(f"{with_engine(run).served_name} serves")


def rollback(name: VersionName, reason: Reason = BY_HAND, tenant: OfTenant = None) -> None:
    """Let no new episode begin with a version: by default the one that serves.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). If the version serves,
    its control serves again, which is always loaded, and all that served since the control is
    rolled back with it; without a control, what served before it serves, or the base model.
    Episodes under way keep their version, and are not trained on. Versions that were trained from
    it never serve. This cannot be undone; the adapter can be exported and imported again.

    Status 2: there is no such version, or it has no new episodes.
    """
    chosen, serves = in_database(
        lambda connection: roll_back_by_hand(connection, name, reason, tenant)
    )
    print(f"{chosen.served_name} is rolled back")
    if serves is not None:
        print(f"{serves.served_name} serves")


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
    unloaded is loaded by the controller or the trainer first: run this where the model servers
    (PAWL_UPSTREAM_URL, PAWL_REPLICA_URLS) answer.

    Status 2: there is no such version, episode or key, or the line cannot start at the version.
    """
    left_out = [read_query(query) for query in without or ()]
    retrained = with_engine(
        lambda engine: retrain_by_hand(
            engine, name, start, left_out, reason, tenant, dry_run=dry_run
        )
    )
    print(as_text(retrained))


def freeze(
    name: PolicyName,
    off: Annotated[bool, typer.Option("--off", help="Let the controller decide again.")] = False,
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


def split_name(named: str) -> tuple[str, int | None]:
    """Return the policy and the number in `NAME@N`, or the policy and None (pure)."""
    name, at, number = named.rpartition("@")
    return (name, int(number)) if at and number.isdecimal() else (named, None)


async def find_to_promote(
    engine: AsyncEngine, named: str, tenant: str | None = None
) -> tuple[PolicyVersion, PolicyEvent | None]:
    """Return the version to promote, and the event by which it waits for that, if it does.

    With `tenant` it must be that tenant's.

    Raises:
        UnknownPolicy: there is no such version, or none waits.
        NotGated: the version cannot serve, or does already.
    """
    name, number = split_name(named)
    async with engine.connect() as connection:
        versions = await policy_versions(connection, name, tenant)
        chosen = _next(versions) if number is None else numbered(versions, number)
        _check_can_serve(chosen)
        return chosen, await why_waits(connection, chosen)


async def promote_by_hand(
    engine: AsyncEngine,
    version: PolicyVersion,
    reason: str,
    evidence: Mapping[str, Any] | None = None,
) -> PolicyVersion:
    """Give a version the traffic, and return it; one that was unloaded is loaded first.

    Raises:
        NotGated: it is not loaded in time.
        StateChanged, RolledBack: somebody else moved it meanwhile.
    """
    if version.unloaded:
        async with engine.begin() as connection:
            await version_states.recall(
                connection, version.name, version.version, reason=reason, actor=OPERATOR
            )
        await wait_until_loaded(version)
    async with engine.begin() as connection:
        await lock_policies(connection, [version.name])
        now = await numbered_version(connection, version.name, version.version)
        if now is None or now.state != version.state:
            raise StateChanged(
                f"{version.name}@{version.version} is not {version.state!r} any more, so it was not"
                " promoted: look at its state (`pawl policies show`), and decide again"
            )
        await version_states.promote(
            connection,
            version.name,
            version.version,
            reason=reason,
            actor=OPERATOR,
            evidence=evidence,
        )
    return version


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
    if version.state not in PROMOTABLE or version.ended or version.files_deleted:
        why = "its files were deleted" if version.files_deleted else f"it is {version.state!r}"
        why = "it ended when the policy's line started again" if version.ended else why
        raise NotGated(
            f"{version.name}@{version.version} cannot be promoted: {why}, and only versions that"
            f" are {', '.join(PROMOTABLE)} can be; an adapter that was exported can be imported,"
            " which makes it a version of its own"
        )


async def wait_until_loaded(version: PolicyVersion) -> None:
    """Wait until every replica that answers lists a version that was recalled.

    Raises:
        NotGated: it is not listed within `LOADED_WITHIN_S` seconds.
    """
    name = version.served_name
    print(f"{name} was unloaded: waiting for the model servers to load it", file=sys.stderr)
    clock = asyncio.get_running_loop().time
    until, why = clock() + LOADED_WITHIN_S, ""
    async with Replicas(read_settings(ControllerSettings).server_urls) as replicas:
        while clock() < until:
            try:
                listed = await replicas.ask(ModelServer.models)
            except UpstreamAway as error:
                why = str(error)
            else:
                lacking = [server.url for server, models in listed.items() if name not in models]
                if not lacking:
                    return
                why = f"{', '.join(lacking)} has not loaded it"
            await asyncio.sleep(ASKED_EVERY_S)
    raise NotGated(
        f"{name} was not loaded within {LOADED_WITHIN_S:g} s, so it does not serve: {why}; let a"
        " `pawl controller` run, which loads it, see its log, and run this again"
    )


async def roll_back_by_hand(
    connection: AsyncConnection, named: str, reason: str, tenant: str | None = None
) -> tuple[PolicyVersion, PolicyVersion | None]:
    """Take the new episodes from a version, by default the one that serves.

    Return the version, and what serves instead, or None if it did not serve. With `tenant` the
    policy must be that tenant's.

    Raises:
        UnknownPolicy: there is no such version.
        NotGated: the version has no new episodes, or is the base model.
    """
    name, number = split_name(named)
    await policy_versions(connection, name, tenant)
    await lock_policies(connection, [name])
    versions = await policy_versions(connection, name, tenant)
    if number is None:
        [chosen] = [one for one in versions if one.state == "serving"]
    else:
        chosen = numbered(versions, number)
    return chosen, await version_states.roll_back(connection, chosen, reason=reason, actor=OPERATOR)


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
    name: str,
    number: int,
    without: Sequence[str | Selection],
    reason: str,
    tenant: str | None = None,
    *,
    dry_run: bool = False,
) -> Retrained:
    """Start a policy's line again at a version, which is loaded first if it was unloaded.

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
        if start.unloaded:
            why = "it is loaded, so that the policy's line can start again at it"
            await version_states.recall(connection, name, number, reason=why, actor=OPERATOR)
        if dry_run:
            return await retrain(connection)
        await connection.commit()
    if start.unloaded:
        await wait_until_loaded(start)
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
