"""Query the database for the proxy's workers while they serve.

The queries use the driver's own connection: with SQLAlchemy a worker would take a third more
memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from store.driver import Driver
from store.tenants import bare, name_in_same_tenant

# Targets of feedback

# By kind of target: name, episode, call, and a name with the tenant, for the names in $1. A call's
# id is stored without its tenant, which the episode's key shows (`_stored_names`).
_STORED: Final[Mapping[str, str]] = {
    "episode": "SELECT key, id, NULL::uuid, key FROM episodes WHERE key = ANY($1)",
    "response": """SELECT response_id, episode_id, id, response_id FROM transitions
        WHERE response_id = ANY($1)""",
    "call": """SELECT t.id::text, t.episode_id, t.id, e.key
        FROM transitions t JOIN episodes e ON e.id = t.episode_id
        WHERE t.id = ANY($1::text[]::uuid[])""",
}


class Target(NamedTuple):
    """A target that feedback may name, with its episode and call."""

    kind: str
    name: str
    episode_id: UUID
    call_id: UUID | None


async def stored_targets(driver: Driver, wanted: Iterable[tuple[str, str]]) -> list[Target]:
    """Return the stored targets among these (kind, name) pairs."""
    pairs = set(wanted)
    return [
        Target(kind, name, episode_id, call_id)
        for kind, names in _names_by_kind(pairs).items()
        for name, episode_id, call_id in _stored_names(
            kind, await driver.fetch(_STORED[kind], names)
        )
        if (kind, name) in pairs
    ]


async def known_targets(driver: Driver, wanted: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return those of these (kind, name) pairs whose target is stored."""
    return {(target.kind, target.name) for target in await stored_targets(driver, wanted)}


def _names_by_kind(wanted: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    by_kind: dict[str, list[str]] = {}
    for kind, name in wanted:
        by_kind.setdefault(kind, []).append(bare(name) if kind == "call" else name)
    return by_kind


def _stored_names(kind: str, rows: Iterable[Any]) -> Iterator[tuple[str, UUID, UUID | None]]:
    """Yield name, episode and call of stored targets; the name of a call gets its tenant."""
    for name, episode_id, call_id, of_tenant in rows:
        yield name_in_same_tenant(of_tenant, name) if kind == "call" else name, episode_id, call_id


# Bodies of feedback that came with an idempotency key

_BODIES: Final = "SELECT body_hash FROM feedback_requests WHERE idempotency_key = $1"


async def stored_bodies(driver: Driver, key: str) -> set[str]:
    """Return the hashes of the stored feedback bodies that came with idempotency key `key`."""
    return {row[0] for row in await driver.fetch(_BODIES, key)}


# Responses that clients may continue by their ids

# Limited to the wire format: the ids of other APIs' replies may be chosen by their clients.
_RESPONSES: Final = (
    "SELECT DISTINCT response_id FROM transitions WHERE response_id = ANY($1) AND dialect = $2"
)


async def known_responses(driver: Driver, names: Sequence[str], dialect: str) -> set[str]:
    """Return those of the response ids `names` (with tenant) that stored calls of `dialect` have.

    `dialect` is a wire format.
    """
    return {row[0] for row in await driver.fetch(_RESPONSES, list(names), dialect)}


# Versions that episodes keep

_PINNED: Final = """
    SELECT p.policy, e.key, p.latest
    FROM episodes e JOIN episode_policies p ON p.episode_id = COALESCE(e.root, e.id)
    WHERE (e.method <> 'own' OR e.linked) AND e.last_call_at > now() - interval '1 day'
    ORDER BY e.last_call_at DESC LIMIT $1
"""
_PINNED_VERSION: Final = """
    SELECT p.latest FROM episodes e JOIN episode_policies p
        ON p.episode_id = COALESCE(e.root, e.id)
    WHERE e.key = $1 AND p.policy = $2
"""


async def pinned_episodes(driver: Driver, most: int) -> list[tuple[str, str, int]]:
    """Return (policy, episode key, version) of the last day's episodes that later calls may join.

    The newest episodes come first, at most `most`. The version is the newest that served the
    episode: its first may have been unloaded. A part of a joined episode has the version of the
    whole.
    """
    rows = await driver.fetch(_PINNED, most)
    return [(row["policy"], row["key"], row["latest"]) for row in rows]


async def pinned_version(driver: Driver, policy: str, episode: str) -> int | None:
    """Return the version of `policy` that an episode keeps; None if no call of it was served."""
    version: int | None = await driver.fetchval(_PINNED_VERSION, episode, policy)
    return version
