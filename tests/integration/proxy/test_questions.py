"""Episodes without a task's name are grouped by their question, whichever way they are stored."""

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.spool import replay_letters
from proxy.ingester.drain import Drainer
from proxy.ingester.removing import DeadLetter, write_dead_letters
from proxy.spool.segments import CapturedCall, encode_frame, encode_payload
from store.read.episodes import read_episodes
from store.selecting import select_episodes
from tests.support.records import captured

Storing = Callable[[AsyncEngine, Path, Sequence[CapturedCall]], Awaitable[None]]


async def drained(engine: AsyncEngine, folder: Path, calls: Sequence[CapturedCall]) -> None:
    home = folder / "0"
    home.mkdir()
    (home / "1.seg").write_bytes(b"".join(map(encode_frame, calls)))
    drainer = Drainer(folder, lambda: engine, batch=10)
    while await drainer.drain_once():
        pass


async def replayed(engine: AsyncEngine, folder: Path, calls: Sequence[CapturedCall]) -> None:
    letters = [DeadLetter(call.episode, encode_payload(call), "tested") for call in calls]
    write_dead_letters(folder, letters)
    assert await replay_letters(folder, engine) == (len(calls), [])


def asked(episode: str, question: str, now: str) -> CapturedCall:
    messages = [
        {"role": "system", "content": f"It is {now}."},
        {"role": "user", "content": question},
    ]
    return captured(episode, request=json.dumps({"model": "m", "messages": messages}).encode())


@pytest.mark.parametrize("store", [drained, replayed])
async def test_episodes_with_the_same_question_share_a_task(
    engine: AsyncEngine, tmp_path: Path, store: Storing
) -> None:
    """All have the same prompt ids: by these, all would be of one task."""
    said = (("a", "Hello?", "10:01"), ("b", "Hello?", "10:02"), ("c", "Bye?", "10:01"))
    await store(engine, tmp_path, [asked(*one) for one in said])
    async with engine.connect() as connection:
        episodes = await read_episodes(connection, await select_episodes(connection))
    tasks = {episode.key: episode.task for episode in episodes}
    assert tasks["a"] is not None
    assert tasks["a"] == tasks["b"]
    assert tasks["c"] not in (None, tasks["a"])
