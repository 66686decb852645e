"""Read what a run left of a policy: who was spent on what, and every version's bytes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import asyncpg

from store.records import TRAIN
from trainer.publishing.adapters import read_manifest

# All of a version but its manifest, which names the update's id.
COMPARED: Final = ("adapter_model.safetensors", "adapter_config.json", "base.json", "trainer/*")

# Beside the ledger there may be callers of the evaluation split, whose episodes nobody trains.
LEDGER: Final = f"e.split = '{TRAIN}'"

_SPENT: Final = f"""
    SELECT bool_and(
        (SELECT count(*) FROM consumptions WHERE policy = asked)
            = (SELECT count(*) FROM episodes e WHERE {LEDGER})
        AND NOT EXISTS (SELECT FROM policies WHERE name = asked AND state = 'written')
        AND (SELECT version FROM policies WHERE name = asked AND state = 'serving')
            = (SELECT max(version) FROM policies WHERE name = asked))
    FROM unnest($1::text[]) AS asked
"""
_UPDATE_S: Final = """
    SELECT coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY s), 0) FROM (
        SELECT extract(epoch FROM lead(claimed_at) OVER (ORDER BY claimed_at) - claimed_at) AS s
        FROM updates WHERE policy = $1) AS taken
"""
_OUTCOMES: Final = f"""
    SELECT e.key, u.version, u.state, c.trained, c.reason FROM episodes e
    LEFT JOIN consumptions c ON (c.episode_id, c.policy) = (e.id, $1)
    LEFT JOIN updates u ON (u.id, u.policy) = (c.update_id, c.policy)
    WHERE {LEDGER}
"""


_HELD: Final = "SELECT array_agg(id) FROM updates WHERE policy = ANY($1) AND state = 'running'"
_STATES: Final = "SELECT version, state FROM policies WHERE name = $1 ORDER BY version"
_UPDATES: Final = "SELECT state, count(*) FROM updates WHERE policy = $1 GROUP BY 1"


@dataclass(frozen=True, slots=True)
class Found:
    """Describe a policy's end in a run."""

    # By episode: the version it was spent on, and how; None where it was not.
    outcomes: Mapping[str, tuple[int | None, bool, str | None] | None]
    # Episodes that more than one version says it was trained on.
    twice: list[str]
    states: Mapping[int, str]
    updates: Mapping[str, int]
    # By version and file.
    files: Mapping[str, str]
    # From one claim to the next, in the middle.
    update_s: float

    @property
    def lost(self) -> list[str]:
        """Return the episodes that no update that is done has spent."""
        return [key for key, outcome in self.outcomes.items() if outcome is None]


async def all_spent(url: str, policies: Sequence[str]) -> bool:
    """Return whether the policies have nothing left to train, to record or to publish."""
    return bool(await _ask(url, _SPENT, policies))


async def held_by(url: str, policies: Sequence[str]) -> set[UUID]:
    """Return the policies' updates that hold episodes now."""
    return set(await _ask(url, _HELD, policies) or ())


async def _ask(url: str, question: str, policies: Sequence[str]) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(question, list(policies))
    finally:
        await connection.close()


async def found_in(url: str, adapters: Path, policy: str) -> Found:
    """Read it."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch(_OUTCOMES, policy)
        versions = await connection.fetch(_STATES, policy)
        updates = await connection.fetch(_UPDATES, policy)
        update_s = float(await connection.fetchval(_UPDATE_S, policy))
    finally:
        await connection.close()
    folders = sorted((adapters / policy).glob("[0-9]*"), key=lambda folder: int(folder.name))
    return Found(
        outcomes={row["key"]: _outcome(row) for row in rows},
        twice=_twice(folders),
        states=dict(map(tuple, versions)),
        updates=dict(map(tuple, updates)),
        files={
            f"{folder.name}/{path.relative_to(folder)}": sha256(path.read_bytes()).hexdigest()
            for folder in folders
            for pattern in COMPARED
            for path in sorted(folder.glob(pattern))
        },
        update_s=update_s,
    )


def _outcome(row: Any) -> tuple[int | None, bool, str | None] | None:
    return (row["version"], row["trained"], row["reason"]) if row["state"] == "done" else None


def _twice(folders: list[Path]) -> list[str]:
    times: Counter[str] = Counter()
    for folder in folders:
        manifest = read_manifest(folder)
        if manifest is not None:
            times.update(str(outcome.episode_id) for outcome in manifest.outcomes)
    return [episode for episode, count in times.items() if count > 1]


def differing(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> list[str]:
    """Return the keys under which two mappings do not hold the same."""
    keys = sorted({*one, *other}, key=str)
    return [str(key) for key in keys if one.get(key) != other.get(key)]
