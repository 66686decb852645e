"""Real clients, unchanged but for their base URL: they work, and their calls are joined.

Each runs as a process in the clients' own environment (`scripts/install_clients.py`) and holds
two conversations: one in which the model asks for a tool, the client runs it and the model
answers, and one of two streamed turns. Neither names an episode.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stack import CLIENT_BINARIES, run_client
from pawl.stack.stack import Stack
from store.database import make_engine
from store.ids import new_id
from store.read.episodes import read_episodes
from store.records import Episode
from store.selecting import select_episodes
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
# How calls are joined that name their episode; these clients name none.
NAMED = {"header", "url"}


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
    """Run a client to its end, and look at what it saw and at the episodes that it made."""
    engine = make_engine(stack.database_url)
    # What another test asked may be stored while this client works.
    began = new_id()
    check_conversations(json.loads(await run_client(stack.base_url, *command)))

    async def new_episodes() -> list[Episode]:
        async with engine.connect() as connection:
            found = await read_episodes(connection, await select_episodes(connection))
        return [episode for episode in found if any(call.id > began for call in episode.calls)]

    def are_joined(found: list[Episode]) -> bool:
        # Calls are joined by their content just after they are stored.
        calls = sum(len(episode.calls) for episode in found)
        return calls >= 2 * CALLS_A_CONVERSATION and len(found) <= 2

    try:
        check_episodes(await awaited(new_episodes, are_joined, DEADLINE_S))
    finally:
        await engine.dispose()


@pytest.mark.parametrize("client", PYTHON_CLIENTS)
async def test_unchanged_python_clients_work_and_calls_of_a_conversation_are_joined(
    stack: Stack, client: str
) -> None:
    await check_client(stack, CLIENT_BINARIES / "python", CLIENTS / "scenarios" / f"{client}.py")


@pytest.mark.skipif(
    not (CLIENTS / "node" / "node_modules").is_dir(),
    reason="the Node clients are not installed (scripts/install_clients.py says why)",
)
@pytest.mark.parametrize("client", NODE_CLIENTS)
async def test_unchanged_node_clients_work_and_calls_of_a_conversation_are_joined(
    stack: Stack, client: str
) -> None:
    await check_client(stack, CLIENT_BINARIES / "node", CLIENTS / "node" / f"{client}.mjs")
