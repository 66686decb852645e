"""Write JSON lines (`pawl export`): episodes, or held-out tasks."""

from datetime import UTC, datetime
from hashlib import sha256
from typing import IO, Any
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from store.errors import Damaged, StoreError
from store.read.browsing import fates_of
from store.read.episodes import read_in_batches
from store.read.lines import encoded_line
from store.records import Episode
from store.selecting import Selection, keep_for_evaluation, select_episodes, untrained_tasks
from store.tenants import DEFAULT, bare


async def export(engine: AsyncEngine, selection: Selection, out: IO[bytes]) -> int:
    """Write the selected episodes to `out`, and return their number.

    Raises:
        Damaged: some episodes cannot be read back; the message has the reasons. All other episodes
            are written.
    """
    now = datetime.now(UTC)
    count = 0
    damaged: dict[UUID, str] = {}
    async with engine.connect() as connection:
        ids = await select_episodes(connection, selection)
        async for batch in read_in_batches(connection, ids):
            damaged |= batch.damaged
            fates = await fates_of(connection, [episode.id for episode in batch.episodes])
            for episode in batch.episodes:
                try:
                    line = encoded_line(episode, now, fates=fates.get(episode.id, ()))
                except Damaged as error:
                    damaged[episode.id] = str(error)
                    continue
                out.write(line + b"\n")
                count += 1
    if damaged:
        reasons = "\n".join(damaged.values())
        raise Damaged(f"{reasons}; the other {count} episodes are written", damaged)
    return count


async def hold_out(engine: AsyncEngine, selection: Selection, out: IO[bytes], most: int) -> int:
    """Write up to `most` tasks of the selected episodes to `out`, and return their number.

    The tasks are of one tenant, by default the default tenant. All recorded episodes of the written
    tasks become evaluation. Tasks are chosen by a hash. A task is skipped if an update has claimed
    it, or if its first episode cannot be read back or has no question in text.

    Raises:
        StoreError: no task can be held out.
    """
    selection = msgspec.structs.replace(selection, tenant=selection.tenant or DEFAULT)
    async with engine.begin() as connection:
        episodes_of = await untrained_tasks(
            connection, await select_episodes(connection, selection)
        )
        order = sorted(episodes_of, key=lambda task: sha256(task.encode()).digest())
        questions: dict[str, str] = {}
        async for batch in read_in_batches(connection, [episodes_of[task][0] for task in order]):
            for episode in batch.episodes:
                question = _question(episode)
                if question and episode.task and len(questions) < most:
                    questions[episode.task] = question
            if len(questions) == most:
                break
        if not questions:
            raise StoreError(
                "no task can be held out: every selected episode is evaluation already, shares "
                "its task with a trained one, or has no question in text"
            )
        await keep_for_evaluation(
            connection, [id_ for task in questions for id_ in episodes_of[task]]
        )
        for task, question in questions.items():
            out.write(msgspec.json.encode({"id": bare(task), "question": question}) + b"\n")
        out.flush()
    return len(questions)


def _question(episode: Episode) -> str | None:
    """Return the last user message of the first call if it is text only, else None."""
    request: Any = msgspec.json.decode(episode.calls[0].request or b"null")
    if not isinstance(request, dict):
        return None
    messages = request.get("messages", request.get("input"))
    if isinstance(messages, str):
        return messages
    from_user = [m for m in messages or () if isinstance(m, dict) and m.get("role") == "user"]
    content = from_user[-1].get("content") if from_user else None
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(map(str, texts)) if texts and None not in texts else None
    return content if isinstance(content, str) else None
