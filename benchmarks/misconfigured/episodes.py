"""Play agents at work: scored episodes of one call each, sampled by the server as it is now."""

import asyncio
import itertools
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import aiohttp
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.chaos.trainer.cast import ALONE, BASE
from benchmarks.chaos.trainer.episodes import WORDS, Said, call_record
from store.ids import new_id
from store.records import FeedbackItem, FeedbackRecord, SpoolRecord
from store.write.ingest import ingest

# Those of the recipe that is trained with.
MEMBERS: Final = 8
GROUPS: Final = 16
UPDATE: Final = MEMBERS * GROUPS
PROMPT: Final = 9
REPLY: Final = 4
# Raw and processed log-probabilities are the same at one.
TEMPERATURE: Final = 2.0
# A server that was changed may not have the version yet.
AGAIN_S: Final = 0.2
PATIENCE_S: Final = 60.0


class Agents:
    """Try so many tasks at a time, each several times, and get a reward for each try."""

    def __init__(self, engine: AsyncEngine, upstream_url: str) -> None:
        self._engine, self._url = engine, f"{upstream_url}/completions"
        self._dice = random.Random(0)
        self._tasks = itertools.count()

    async def work(self, groups: int, version: int) -> None:
        """Store the episodes of so many tasks, sampled by a version.

        Raises:
            TimeoutError: the server does not have the version.
        """
        records: list[SpoolRecord] = []
        async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_S):
            for task in itertools.islice(self._tasks, groups):
                prompt = [self._dice.randrange(2, WORDS) for _ in range(PROMPT)]
                said = [await self._ask(session, prompt, version) for _ in range(MEMBERS)]
                records += _group(task, said, version)
        async with self._engine.begin() as connection:
            await ingest(connection, records)

    async def _ask(self, session: aiohttp.ClientSession, prompt: list[int], version: int) -> Said:
        body = {
            "model": f"{BASE}@{version}" if version else BASE,
            "prompt": prompt,
            "max_tokens": REPLY,
            "temperature": TEMPERATURE,
            "logprobs": 0,
        }
        while True:
            async with session.post(self._url, json=body) as reply:
                if reply.status == 200:
                    choice = (await reply.json())["choices"][0]
                    return Said(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])
            await asyncio.sleep(AGAIN_S)


def _group(task: int, tries: Sequence[Said], version: int) -> list[SpoolRecord]:
    """Return the tries of a task; no two have the same reward, so that they have a spread."""
    records: list[SpoolRecord] = []
    for number, said in enumerate(tries):
        key, at = f"e{task}-{number}", datetime.now(UTC)
        item = FeedbackItem(
            id=new_id(),
            metric="reward",
            value=number / MEMBERS,
            target_kind="episode",
            target=key,
        )
        records.append(call_record(key, f"t{task}", ALONE, said, at, version, TEMPERATURE))
        records.append(FeedbackRecord(id=new_id(), at=at, items=(item,)))
    return records
