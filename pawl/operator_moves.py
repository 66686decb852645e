"""Move a policy's traffic by hand, from commands and the console.

Each change is recorded with the actor `operator`; the caller names the person in the reason.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store import retraining, version_states
from store.errors import StateChanged, StoreError, UnknownNames, UnknownPolicy, WrongVersionState
from store.retraining import Retrained
from store.selecting import Selection, find_named_episodes, select_episodes
from store.tenants import scoped
from store.version_queries import list_events, list_versions, numbered_version
from store.version_states import lock_policies
from store.versions import Actor, PolicyEvent, PolicyState, PolicyVersion

OPERATOR: Final[Actor] = "operator"
# The states of versions that may get the traffic by hand.
PROMOTABLE: Final[tuple[PolicyState, ...]] = ("loaded", "canary", "retired")
# If no version is named, one in the first of these states is promoted.
DEFAULT_STATES: Final[tuple[PolicyState, ...]] = ("canary", "loaded")
# Waits until the model servers have loaded a recalled version, or raises `WrongVersionState`.
WaitUntilLoaded = Callable[[PolicyVersion], Awaitable[None]]
# The fields of a query; fields with a time end with `since` or `before`.
QUERY_FIELDS: Final = (
    *("episode", "task", "prefix", "agent", "key"),
    *("since", "before", "scored-since", "scored-before"),
)
_FIELD: Final = "|".join(QUERY_FIELDS)
_FIRST_FIELD: Final = re.compile(rf"(?:{_FIELD})=")
_NEXT_FIELD: Final = re.compile(rf",(?=(?:{_FIELD})=)")


# Finding versions


async def policy_versions(
    connection: AsyncConnection, name: str, tenant: str | None = None
) -> list[PolicyVersion]:
    """Return the versions of a policy, oldest first; with `tenant`, only that tenant's are found.

    Raises:
        UnknownPolicy: there is no such policy; the message names the existing ones.
    """
    of_all = await list_versions(connection)
    own = [version for version in of_all if tenant in (None, version.tenant)]
    versions = [version for version in own if version.name == name]
    if not versions:
        known = sorted({version.name for version in own})
        names = ", ".join(known) or "there is none yet: start `pawl trainer`"
        raise UnknownPolicy(f"there is no policy {name!r} (known: {names})")
    return versions


def version_numbered(versions: list[PolicyVersion], number: int) -> PolicyVersion:
    """Return the version of a policy with this number.

    Raises:
        UnknownPolicy: there is no such version; the message names the existing ones.
    """
    for version in versions:
        if version.version == number:
            return version
    known = ", ".join(str(one.version) for one in versions)
    raise UnknownPolicy(f"policy {versions[0].name!r} has no version {number} (there are: {known})")


def chosen_version(versions: list[PolicyVersion], number: int | None) -> PolicyVersion:
    """Return the version with this number (None: the serving one) if it has an adapter.

    Raises:
        UnknownPolicy: there is no such version, or it has no adapter or files; the message names
            versions that do.
    """
    name = versions[0].name
    trained = ", ".join(str(one.version) for one in versions if one.version) or "none yet"
    if number is None:
        number = next((one.version for one in versions if one.state == "serving"), None)
    version = next((one for one in versions if one.version == number), None)
    if version is None:
        raise UnknownPolicy(f"policy {name!r} has no version {number} (with an adapter: {trained})")
    if not version.version:
        raise UnknownPolicy(
            f"{name}@0 is the base model, which has no adapter: name a version (there are:"
            f" {trained})"
        )
    if version.files_deleted:
        with_files = [str(one.version) for one in versions if one.version and not one.files_deleted]
        raise UnknownPolicy(
            f"the files of {version.served_name} were deleted, as the version was"
            f" {version.state} and was not needed any more (versions with files:"
            f" {', '.join(with_files) or 'none'})"
        )
    return version


async def approval_event(connection: AsyncConnection, version: PolicyVersion) -> PolicyEvent | None:
    """Return the event that made a version wait for approval; None if it does not wait."""
    if not version.awaits_approval:
        return None
    [newest] = await list_events(connection, version.name, version.version, most=1)
    return newest


def split_name(named: str) -> tuple[str, int | None]:
    """Split a version's name `NAME@N` into policy and number; None: it has no number (pure)."""
    name, at, number = named.rpartition("@")
    return (name, int(number)) if at and number.isdecimal() else (named, None)


async def find_to_promote(
    connection: AsyncConnection, named: str, tenant: str | None = None
) -> tuple[PolicyVersion, PolicyEvent | None]:
    """Return the version to promote, and the event that made it wait for approval, if any.

    With `tenant` the policy must be that tenant's.

    Raises:
        UnknownPolicy: there is no such policy or version, or none is named and none is a canary or
            loaded.
        WrongVersionState: the version cannot serve, or serves already.
    """
    name, number = split_name(named)
    versions = await policy_versions(connection, name, tenant)
    if number is None:
        number = next(
            (v.version for state in DEFAULT_STATES for v in versions if v.state == state), None
        )
    if number is None:
        raise UnknownPolicy(
            f"no version of {name!r} is a canary or loaded: name the one to promote, as {name}@N"
        )
    chosen = version_numbered(versions, number)
    _check_can_serve(chosen)
    return chosen, await approval_event(connection, chosen)


async def promote_by_hand(
    engine: AsyncEngine,
    version: PolicyVersion,
    reason: str,
    evidence: Mapping[str, Any] | None = None,
    *,
    wait_until_loaded: WaitUntilLoaded,
) -> PolicyVersion:
    """Give a version the traffic, and return it; an unloaded version is loaded first.

    Raises:
        WrongVersionState: the version is not loaded in time.
        StateChanged, RolledBack: its state was changed meanwhile.
    """
    if version.unloaded:
        async with engine.begin() as connection:
            name, number = version.name, version.version
            await version_states.recall(connection, name, number, reason=reason, actor=OPERATOR)
        await wait_until_loaded(version)
    async with engine.begin() as connection:
        await promote_unless_changed(connection, version, reason, evidence)
    return version


async def promote_unless_changed(
    connection: AsyncConnection,
    version: PolicyVersion,
    reason: str,
    evidence: Mapping[str, Any] | None = None,
) -> None:
    """Give a loaded version the traffic, unless its state has changed since it was read.

    Raises:
        StateChanged, RolledBack: its state was changed meanwhile.
    """
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


def _check_can_serve(version: PolicyVersion) -> None:
    if version.state == "serving":
        raise WrongVersionState(f"{version.name}@{version.version} serves already")
    if version.state not in PROMOTABLE or version.ended or version.files_deleted:
        why = "its files were deleted" if version.files_deleted else f"it is {version.state!r}"
        why = "it ended when the policy's line started again" if version.ended else why
        raise WrongVersionState(
            f"{version.name}@{version.version} cannot be promoted: {why}, and only versions that"
            f" are {', '.join(PROMOTABLE)} can be; an exported adapter can be imported as"
            " a new version"
        )


async def roll_back_by_hand(
    connection: AsyncConnection, named: str, reason: str, tenant: str | None = None
) -> tuple[PolicyVersion, PolicyVersion | None]:
    """Roll back a version, by default the serving one.

    Return the version, and the one that serves instead, or None if the version did not serve. With
    `tenant` the policy must be that tenant's.

    Raises:
        UnknownPolicy: there is no such policy or version.
        WrongVersionState: the version is not loaded, a canary or serving, or is the base model.
    """
    name, number = split_name(named)
    await policy_versions(connection, name, tenant)
    await lock_policies(connection, [name])
    versions = await policy_versions(connection, name, tenant)
    if number is None:
        [chosen] = [one for one in versions if one.state == "serving"]
    else:
        chosen = version_numbered(versions, number)
    return chosen, await version_states.roll_back(connection, chosen, reason=reason, actor=OPERATOR)


async def freeze_by_hand(
    connection: AsyncConnection,
    name: str,
    reason: str,
    tenant: str | None = None,
    *,
    frozen: bool = True,
) -> None:
    """Freeze a policy, so that only operators move its traffic; unfreeze it if not `frozen`.

    Raises:
        UnknownPolicy: there is no such policy, or it is another tenant's.
    """
    await policy_versions(connection, name, tenant)
    await version_states.freeze(connection, name, frozen=frozen, reason=reason, actor=OPERATOR)


class BadQuery(StoreError):
    """A query cannot be read; the message names the field and the remedy."""


def read_query(query: str) -> str | Selection:
    """Parse an episode's key or id, or conditions `FIELD=VALUE` separated by commas (pure).

    A query for one episode is returned as its key or id, conditions as a Selection.

    A comma belongs to the value unless `FIELD=` follows. A time without a zone is in this machine's
    zone.

    Raises:
        BadQuery: a value is missing or not a time, a field is repeated, or `episode` is combined
            with other conditions.
    """
    pairs = [("episode", query)]
    if _FIRST_FIELD.match(query):
        pairs = [one.partition("=")[::2] for one in _NEXT_FIELD.split(query)]
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
                values[field] = datetime.fromisoformat(value).astimezone()
            except (ValueError, OverflowError) as error:
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
    wait_until_loaded: WaitUntilLoaded,
) -> Retrained:
    """Start a policy's line again at a version, without the named or selected episodes.

    An unloaded version is loaded first. With `dry_run` nothing is committed. With `tenant` the
    policy must be that tenant's.

    Raises:
        UnknownPolicy, UnknownNames: there is no such policy, version, episode or API key, or the
            version's files were deleted.
        WrongVersionState, StateChanged, RolledBack: nothing was trained yet, or the version cannot
            serve, or is not loaded in time; the message says which.
    """
    async with engine.connect() as connection:
        versions = await policy_versions(connection, name, tenant)
        base = version_numbered(versions, 0)
        start = chosen_version(versions, number) if number else base
        left_out = await _find_episodes(connection, base.tenant, without)
        if start.unloaded:
            why = "it is loaded, so that the policy's line can start again at it"
            await version_states.recall(connection, name, number, reason=why, actor=OPERATOR)
        retrain = partial(
            retraining.retrain,
            policy=name,
            version=number,
            left_out=left_out,
            reason=reason,
            actor=OPERATOR,
        )
        if dry_run:
            return await retrain(connection)
        await connection.commit()
    if start.unloaded:
        await wait_until_loaded(start)
    async with engine.begin() as connection:
        return await retrain(connection)


async def _find_episodes(
    connection: AsyncConnection, tenant: str, without: Sequence[str | Selection]
) -> set[UUID]:
    names = [scoped(tenant, one) for one in without if isinstance(one, str)]
    chosen = await find_named_episodes(connection, names)
    if chosen.unknown:
        raise UnknownNames(
            f"these episodes are not recorded, and nothing was changed: {list(chosen.unknown)[:5]};"
            " correct the names, or leave them away if their calls wait in a spool"
        )
    ids = set(chosen.wholes)
    for selection in (one for one in without if isinstance(one, Selection)):
        ids |= set(
            await select_episodes(connection, msgspec.structs.replace(selection, tenant=tenant))
        )
    return ids


def describe_retrained(retrained: Retrained, *, dry: bool) -> str:
    """Describe in words what a retraining did, or with `dry` would do."""
    instead = f" in place of {retrained.served}" if retrained.served != retrained.serves else ""
    freed = ", ".join(f"{number} {why}" for why, number in sorted(retrained.freed.items()))
    serves = "would serve" if dry else "serves"
    text = (
        f"{retrained.serves} {serves}{instead}; versions ended: {retrained.ended};"
        f" episodes freed: {freed or 'none'}; episodes left out: {retrained.left_out}"
    )
    if retrained.learned:
        text += (
            f"\n{retrained.serves} learned from {retrained.learned} of the episodes to leave out:"
            " start at an earlier version"
        )
    if retrained.abandoned is not None:
        text += (
            f"\nupdate {retrained.abandoned}, which runs, {'would be' if dry else 'is'} abandoned"
        )
    if retrained.max_staleness is not None and retrained.ended > retrained.max_staleness:
        text += (
            f"\nclaim.max_staleness is {retrained.max_staleness}: once the new line has that many"
            " versions, freed episodes that still wait expire; raise it until they are trained"
        )
    return text
