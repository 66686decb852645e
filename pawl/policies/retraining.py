"""Start a policy's line of versions again at an older one, without some episodes."""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pawl.commands.common import with_zone
from pawl.policies.lookup import chosen_version, policy_versions
from pawl.policies.moving import OPERATOR, load_if_called_back, numbered
from store.errors import StoreError, UnknownNames
from store.records import Record
from store.retraining import Retrained, retrain
from store.selecting import Selection, named, selected
from store.tenants import scoped
from store.version_states import change_state
from trainer.publishing.model_server import Replicas

# The fields of a query, as they are written, and as `Selection` has them.
FIELDS: Final = {
    "task": "task",
    "prefix": "prefix",
    "agent": "agent",
    "key": "key",
    "since": "since",
    "before": "begun_before",
    "scored-since": "scored_since",
    "scored-before": "scored_before",
    "episode": "episode",
}
TIMES: Final = ("since", "before", "scored-since", "scored-before")
_FIELD: Final = "|".join(FIELDS)
_BEGINS: Final = re.compile(rf"(?:{_FIELD})=")
_NEXT: Final = re.compile(rf",(?=(?:{_FIELD})=)")


class BadQuery(StoreError):
    """Report a query that cannot be read; the message names the field and the remedy."""


class Without(Record, frozen=True, kw_only=True):
    """Hold what is left out: episodes by key or id, and those that a selection selects."""

    names: tuple[str, ...] = ()
    selections: tuple[Selection, ...] = ()


def read_without(texts: Sequence[str]) -> Without:
    """Read queries (pure): an episode's key or id, or conditions `FIELD=VALUE` between commas.

    A comma in a value is part of it unless a field follows.

    Raises:
        BadQuery: a value is missing or is no time, a field comes twice, or an episode's name has
            further conditions.
    """
    names, selections = [], []
    for query in texts:
        pairs = [("episode", query)]
        if _BEGINS.match(query):
            pairs = [one.partition("=")[::2] for one in _NEXT.split(query)]
        values: dict[str, str | datetime | None] = {}
        for field, value in pairs:
            if not value:
                raise BadQuery(f"--without {query!r}: {field}: write {field}=VALUE, with a value")
            if FIELDS[field] in values:
                raise BadQuery(f"--without {query!r}: {field}: it comes twice: give it once")
            values[FIELDS[field]] = _time(query, field, value) if field in TIMES else value
        name = values.pop("episode", None)
        if name is not None and values:
            raise BadQuery(
                f"--without {query!r}: episode: a name selects one episode: leave the other"
                " conditions away, or give a --without of their own"
            )
        if name is None:
            selections.append(msgspec.convert(values, Selection))
        else:
            names.append(str(name))
    return Without(names=tuple(names), selections=tuple(selections))


def _time(query: str, field: str, value: str) -> datetime | None:
    try:
        return with_zone(datetime.fromisoformat(value))
    except ValueError as error:
        raise BadQuery(
            f"--without {query!r}: {field}: {value!r} is no time: write it as 2026-11-22 or"
            " 2026-11-22T14:30, with a zone (+01:00) or in this machine's"
        ) from error


async def retrain_by_hand(
    engine: AsyncEngine,
    replicas: Replicas,
    named_start: tuple[str, int],
    without: Without,
    reason: str,
    tenant: str | None = None,
    *,
    dry_run: bool = False,
) -> Retrained:
    """Start a policy's line again at a version, which is loaded first if it is on no server.

    `named_start` is its policy's name and its number; with `tenant` it must be that tenant's. With
    `dry_run` nothing is kept.

    Raises:
        UnknownPolicy, UnknownNames: there is no such version, episode or API key.
        NotGated, StateChanged, RolledBack: the line cannot start there; the message says why.
    """
    name, number = named_start
    async with engine.connect() as connection:
        versions = await policy_versions(connection, name, tenant)
        base = numbered(versions, 0)
        start = chosen_version(versions, number) if number else base
        left_out = await _episodes(connection, base.tenant, without)
        if start.state == "retired":
            why = "it is loaded, so that the policy's line can start again at it"
            await change_state(connection, start, "published", reason=why, actor=OPERATOR)
            start = msgspec.structs.replace(start, state="published")
        if dry_run:
            return await retrain(connection, name, number, left_out, reason=reason, actor=OPERATOR)
        await connection.commit()
    await load_if_called_back(engine, replicas, start, base)
    async with engine.begin() as connection:
        return await retrain(connection, name, number, left_out, reason=reason, actor=OPERATOR)


async def _episodes(connection: AsyncConnection, tenant: str, without: Without) -> set[UUID]:
    chosen = await named(connection, [scoped(tenant, name) for name in without.names])
    if chosen.unknown:
        raise UnknownNames(
            f"these episodes are not recorded, and nothing was changed: {list(chosen.unknown)[:5]};"
            " correct the names, or leave them away if their calls wait in a spool"
        )
    ids = set(chosen.wholes)
    for selection in without.selections:
        ids |= set(await selected(connection, msgspec.structs.replace(selection, tenant=tenant)))
    return ids


def as_text(retrained: Retrained) -> str:
    """Return in words what a retraining did, or would do."""
    instead = f" in place of {retrained.served}" if retrained.served != retrained.serves else ""
    freed = ", ".join(f"{number} {why}" for why, number in sorted(retrained.freed.items()))
    told = (
        f"{retrained.serves} serves{instead}; versions ended: {retrained.ended}; episodes freed:"
        f" {freed or 'none'}; episodes left out: {retrained.left_out}"
    )
    if retrained.learned:
        told += (
            f"\n{retrained.serves} learned from {retrained.learned} of the episodes to leave out:"
            " start at an earlier version"
        )
    if retrained.max_staleness is not None and retrained.ended > retrained.max_staleness:
        told += (
            f"\nclaim.max_staleness is {retrained.max_staleness}: once the new line has so many"
            " versions, freed episodes that still wait expire; raise it until they are trained"
        )
    return told
