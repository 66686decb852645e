"""Find a policy and its versions by what the user named; an error says which there are."""

from typing import Annotated

import msgspec
import typer
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import UnknownPolicy
from store.version_queries import list_events, list_versions
from store.versions import PolicyEvent, PolicyVersion

PolicyName = Annotated[str, typer.Argument(help="Name of the policy.", show_default=False)]


async def policy_versions(
    connection: AsyncConnection, name: str, tenant: str | None = None
) -> list[PolicyVersion]:
    """Return the versions of a policy (None: whosever it is, else this tenant's), oldest first.

    Raises:
        UnknownPolicy: there is no policy of that name; the message names those that there are.
    """
    of_all = await list_versions(connection)
    own = [version for version in of_all if tenant in (None, version.tenant)]
    versions = [version for version in own if version.name == name]
    if not versions:
        known = sorted({version.name for version in own})
        names = ", ".join(known) or "there is none yet: start `pawl trainer`"
        raise UnknownPolicy(f"there is no policy {name!r} (known: {names})")
    return versions


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


def chosen_version(versions: list[PolicyVersion], number: int | None) -> PolicyVersion:
    """Return the version with this number (None: that which serves) if it has an adapter.

    Raises:
        UnknownPolicy: there is none; the message names those that have one.
    """
    name = versions[0].name
    trained = ", ".join(str(one.version) for one in versions if one.version) or "none yet"
    with_files = [str(one.version) for one in versions if one.version and not one.files_deleted]
    for version in versions:
        if version.version == number and version.files_deleted:
            raise UnknownPolicy(
                f"the files of {version.served_name} were deleted, as the version was"
                f" {version.state} and nothing asked for them any more (there are those of:"
                f" {', '.join(with_files) or 'none'})"
            )
        if version.version == number or (number is None and version.state == "serving"):
            if version.version:
                return version
            raise UnknownPolicy(
                f"{name}@0 is the base model, which has no adapter: name a version (there are:"
                f" {trained})"
            )
    raise UnknownPolicy(f"policy {name!r} has no version {number} (with an adapter: {trained})")


def shown_wait(waits: PolicyEvent) -> str:
    """Return in words why a version waits, with the evidence as JSON (pure)."""
    evidence = msgspec.json.encode(waits.evidence).decode()
    return f"{waits.name}@{waits.version}: {waits.reason}\n{evidence}"


async def why_waits(connection: AsyncConnection, version: PolicyVersion) -> PolicyEvent | None:
    """Return the event by which a version waits for a person, with the evidence; None: it does not.

    It is the version's newest, and says that its state stays.
    """
    if version.state not in ("loaded", "canary"):
        return None
    [newest] = await list_events(connection, version.name, version.version, most=1)
    is_wait = newest.from_state == newest.to_state and newest.evidence is not None
    return newest if is_wait else None
