"""Deleting and keeping for days while records are stored, with kills in between."""

import asyncio
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.ingester.removing import remove_all
from store.ids import lowest_id_at
from store.keep_days import Cuts
from store.records import CallRecord, SpoolRecord
from store.values.digests import PREFIX
from store.write.ingest import Ingester
from tests.integration.deleting.test_delete_command import pawl
from tests.integration.deleting.test_deleting import body, digest, now
from tests.support.ledger.deleting import exported, places_with
from tests.support.records import call, reward

NOON = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
CUTS = Cuts(others=NOON.date() - timedelta(days=2))
EPISODES = 60
KINDS = ("gone", "old", "kept")


def records_of(kind: str, number: int, dice: random.Random) -> list[SpoolRecord]:
    """Return an episode of two calls and a reward, which repeats what others were told."""
    key = f"{kind}/{number}"
    began = NOON - timedelta(days=9 if kind == "old" else 0)
    # Others of its kind: an episode that is joined with a deleted one is deleted with it.
    told, asked = (digest(PREFIX, f"{kind}{dice.randrange(4)}") for _ in range(2))
    made: list[SpoolRecord] = []
    for turn in range(2):
        place = 10 * (EPISODES * KINDS.index(kind) + number) + turn
        fields: dict[str, Any] = {
            "id": UUID(int=lowest_id_at(began).int + place),
            "started_at": began,
        }
        made.append(
            call(
                key,
                method="own",
                request=body("shared", *[f"canary {key} "] * (turn + 1)),
                provides=(told,) if turn else (),
                needs=(asked,) if dice.random() < 0.3 else (),
                **fields,
            )
        )
    return [*made, now(reward(dice.random(), episode=key))]


async def store_all(engine: AsyncEngine, batches: Sequence[Sequence[SpoolRecord]]) -> None:
    """Store batches one after the other, as an ingester does."""
    ingester = Ingester()
    for batch in batches:
        await ingester.store(engine, batch)
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(2))
async def test_what_is_deleted_is_gone_and_all_else_is_there(
    engine: AsyncEngine, database_url: str, tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    episodes = [records_of(kind, number, dice) for number in range(EPISODES) for kind in KINDS]
    dice.shuffle(episodes)
    batches = [
        [record for episode in episodes[at : at + 5] for record in episode]
        for at in range(0, len(episodes), 5)
    ]
    # Each batch is stored by one ingester or the other, and many by both.
    first, second = batches[: 2 * len(batches) // 3], batches[len(batches) // 3 :]
    storing = asyncio.gather(store_all(engine, first), store_all(engine, second))
    while not storing.done():
        process = pawl(database_url, tmp_path, ["--prefix", "gone/", "--json"])
        assert process.stdout is not None
        for _ in range(dice.randrange(1, 8)):
            await asyncio.to_thread(process.stdout.readline)
        process.kill()
        await asyncio.to_thread(process.communicate)
        await remove_all(engine, CUTS)
    await storing
    ended = pawl(database_url, tmp_path, ["--prefix", "gone/", "--json"])
    _, err = await asyncio.to_thread(ended.communicate)
    assert ended.returncode == 0, err
    await remove_all(engine, CUTS)
    # Everything comes once more, as after a kill of the ingesters.
    await store_all(engine, batches)
    found = await exported(engine)
    parts = {call["call"] for line in found.values() for call in line["calls"]}
    calls = [record for episode in episodes for record in episode if isinstance(record, CallRecord)]
    kept = [record for record in calls if record.episode.startswith("kept/")]
    assert parts >= {str(record.id) for record in kept}
    assert len(kept) == 2 * EPISODES
    assert await places_with(engine, "canary gone/") == []
    assert await places_with(engine, "gone/") == []
    assert await places_with(engine, "canary old/") == []
