"""Real clients, unchanged, told nothing but the base URL: they work, and their calls are joined.

Each runs as a process in the clients' own environment (`scripts/install_clients.py`) and holds
two conversations: one in which the model asks for a tool, the client runs it and the model
answers, and one of two streamed turns. Neither names an episode.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from benchmarks.stack import CLIENT_BINARIES, run_client
from pawl.stack.stack import Stack
from store.database import make_engine
from store.read.episodes import episode_ids, read_episodes
from store.records import Episode
from tests.conftest import ROOT
from tests.support.waiting import awaited

CLIENTS = ROOT / "tests" / "clients"
PYTHON_CLIENTS = sorted(
    path.stem for path in (CLIENTS / "scenarios").glob("*.py") if path.stem != "conversation"
)
NODE_CLIENTS = sorted(
    path.stem for path in (CLIENTS / "node").glob("*.mjs") if path.stem != "conversation"
)
CALLS_A_CONVERSATION = 2
DEADLINE_S = 60.0
# Calls that were joined by what their content says, not by what somebody wrote into them.
NAMED = {"header", "url"}


async def converse(stack: Stack, *command: str | Path) -> dict[str, Any]:
    """Run a client to its end; what it says it saw."""
    seen: dict[str, Any] = json.loads(await run_client(stack.base_url, *command))
    return seen


class Ledger:
    """The episodes that were not there before."""

    def __init__(self, stack: Stack) -> None:
        self._engine = make_engine(stack.database_url)
        self._before: set[UUID] = set()

    async def _ids(self) -> list[UUID]:
        async with self._engine.connect() as connection:
            return [i for i in await episode_ids(connection) if i not in self._before]

    async def mark(self) -> None:
        """What is there now does not count."""
        self._before |= set(await self._ids())

    async def new_episodes(self, count: int, calls: int) -> list[Episode]:
        """The new episodes, oldest first, once so many hold so many calls, or time is up.

        Calls that are joined by what was said are joined just after they are stored.
        """

        def are_joined(found: list[Episode]) -> bool:
            return sum(len(one.calls) for one in found) >= calls and len(found) <= count

        return await awaited(self._new, are_joined, DEADLINE_S)

    async def _new(self) -> list[Episode]:
        ids = await self._ids()
        async with self._engine.connect() as connection:
            return await read_episodes(connection, ids)

    async def close(self) -> None:
        await self._engine.dispose()


def check_conversations(seen: dict[str, Any]) -> None:
    """The tool was run once and its result came back in an answer; both turns were streamed."""
    assert seen["ran"] == ["Lima"]
    assert "sunny" in seen["answer"]
    assert len(seen["streamed"]) == CALLS_A_CONVERSATION
    assert all(len(pieces) > 1 and "".join(pieces) for pieces in seen["streamed"])


def check_episodes(episodes: Sequence[Episode]) -> None:
    """One episode a conversation, with its calls in order and nothing else."""
    assert [len(episode.calls) for episode in episodes] == [CALLS_A_CONVERSATION] * 2
    assert all(episode.method not in NAMED for episode in episodes)
    assert all(episode.quarantined_reason is None for episode in episodes)
    joined = [episode.calls[1].method for episode in episodes]
    assert joined[0] in ("tool_call", "response")
    assert joined[1] in ("prefix", "response")
    tool_using, streamed = episodes
    asking, answering = tool_using.calls
    [asked] = asking.tool_calls
    assert asked.name == "weather"
    assert answering.tool_calls == ()
    assert asked.id in (answering.request or b"").decode()
    assert [wants_a_stream(call.request) for call in streamed.calls] == [True, True]
    first, second = (call.request or b"" for call in streamed.calls)
    assert b"what did I just tell you" not in first
    assert b"what did I just tell you" in second


def wants_a_stream(request: bytes | None) -> bool:
    return json.loads(request or b"{}").get("stream") is True


async def check_client(stack: Stack, *command: str | Path) -> None:
    ledger = Ledger(stack)
    try:
        await ledger.mark()
        check_conversations(await converse(stack, *command))
        check_episodes(await ledger.new_episodes(2, 2 * CALLS_A_CONVERSATION))
    finally:
        await ledger.close()


@pytest.mark.parametrize("client", PYTHON_CLIENTS)
async def test_python_clients_are_unchanged_and_joined(stack: Stack, client: str) -> None:
    await check_client(stack, CLIENT_BINARIES / "python", CLIENTS / "scenarios" / f"{client}.py")


@pytest.mark.skipif(
    not (CLIENTS / "node" / "node_modules").is_dir(),
    reason="the Node clients are not installed (scripts/install_clients.py says why)",
)
@pytest.mark.parametrize("client", NODE_CLIENTS)
async def test_node_clients_are_unchanged_and_joined(stack: Stack, client: str) -> None:
    await check_client(stack, CLIENT_BINARIES / "node", CLIENTS / "node" / f"{client}.mjs")
