"""Move a policy's traffic by hand: promote a version, roll one back, or freeze the gate."""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pawl.policies.lookup import policy_versions
from pawl.steward.evidence import OnTrial
from pawl.steward.rollback import (
    Loaded,
    RollbackTarget,
    call_back,
    load_again,
    make_room,
    roll_back_to,
)
from store.errors import NotGated, StateChanged, UnknownPolicy
from store.read.standing import gated
from store.version_queries import numbered_version, was_called_back
from store.version_states import freeze, lock_policies, promote, roll_back
from store.versions import Actor, PolicyState, PolicyVersion
from trainer.publishing.model_server import Replicas

OPERATOR: Final[Actor] = "operator"
# The states of versions that every model server has loaded, and that do not serve.
LOADED: Final[tuple[PolicyState, ...]] = ("candidate", "canary", "ready", "published")
# Which of them is meant where none is named: the one that is tried, or waits for it.
NEXT: Final[tuple[PolicyState, ...]] = ("canary", "candidate", "ready")


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
        chosen = _chosen(versions, number)
        _refuse_what_cannot_serve(chosen)
    await load_if_called_back(engine, replicas, chosen, numbered(versions, 0))
    async with engine.begin() as connection:
        evidence = await _trial_so_far(connection, chosen)
        await lock_policies(connection, [name])
        await _refuse_what_has_moved(connection, chosen)
        await promote(
            connection, name, chosen.version, reason=reason, actor=OPERATOR, evidence=evidence
        )
    return chosen


def _chosen(versions: list[PolicyVersion], number: int | None) -> PolicyVersion:
    name = versions[0].name
    if number is not None:
        return numbered(versions, number)
    for state in NEXT:
        for version in versions:
            if version.state == state:
                return version
    raise UnknownPolicy(
        f"no version of {name!r} is tried, or waits for it: name the one to promote, as {name}@N"
    )


def numbered(versions: list[PolicyVersion], number: int) -> PolicyVersion:
    """Return the version of a policy with this number.

    Raises:
        UnknownPolicy: there is none; the message names those that there are.
    """
    for version in versions:
        if version.version == number:
            return version
    known = ", ".join(str(one.version) for one in versions)
    raise UnknownPolicy(f"policy {versions[0].name!r} has no version {number} (there are: {known})")


def _refuse_what_cannot_serve(version: PolicyVersion) -> None:
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


async def _refuse_what_has_moved(connection: AsyncConnection, chosen: PolicyVersion) -> None:
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
            await roll_back(connection, chosen, reason=reason, actor=OPERATOR)
            return chosen, None, None
        before, _ = await call_back(connection, chosen, OPERATOR)
    await make_room(engine, replicas, before.version, OPERATOR)
    loaded = await load_again(replicas, before)
    async with engine.begin() as connection:
        serves = await roll_back_to(connection, chosen, loaded, reason=reason, actor=OPERATOR)
    return chosen, serves, loaded


async def freeze_by_hand(
    engine: AsyncEngine, name: str, reason: str, tenant: str | None = None, *, frozen: bool
) -> None:
    """Let only operators move the policy's traffic from now on; or, if not `frozen`, all again.

    With `tenant` the policy must be that tenant's.

    Raises:
        UnknownPolicy: there is no such policy.
    """
    async with engine.begin() as connection:
        await policy_versions(connection, name, tenant)
        await freeze(connection, name, frozen=frozen, reason=reason, actor=OPERATOR)
