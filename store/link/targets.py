"""Look up the targets of feedback: which episode and call a statement is about."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

# By kind of target: name, episode and call of those whose names are in the one parameter.
_STORED: Final[Mapping[str, str]] = {
    "episode": "SELECT key, id, NULL::uuid FROM episodes WHERE key = ANY($1)",
    "response": "SELECT response_id, episode_id, id FROM transitions WHERE response_id = ANY($1)",
    "call": "SELECT id::text, episode_id, id FROM transitions WHERE id = ANY($1::text[]::uuid[])",
}


class Target(NamedTuple):
    """Name a target that feedback may use, with the episode and call that it stands for."""

    kind: str
    name: str
    episode_id: UUID
    call_id: UUID | None


async def stored_targets(driver: Any, wanted: Iterable[tuple[str, str]]) -> list[Target]:
    """Return those of the (kind, name) pairs that are stored, on the driver's own connection."""
    return [
        Target(kind, name, episode_id, call_id)
        for kind, names in _by_kind(wanted).items()
        for name, episode_id, call_id in await driver.fetch(_STORED[kind], names)
    ]


async def known_targets(
    connection: AsyncConnection, wanted: Iterable[tuple[str, str]]
) -> set[tuple[str, str]]:
    """Return those of the (kind, name) pairs that are stored."""
    return {
        (kind, row[0])
        for kind, names in _by_kind(wanted).items()
        for row in await connection.exec_driver_sql(_STORED[kind], (names,))
    }


def _by_kind(wanted: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    by_kind: dict[str, list[str]] = {}
    for kind, name in wanted:
        by_kind.setdefault(kind, []).append(name)
    return by_kind
