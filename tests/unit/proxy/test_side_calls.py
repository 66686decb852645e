"""Side calls of coding agents, as their programs send them, and calls that only look like them.

`side_calls.json` has what the named versions sent, with long texts and most tools cut off.
"""

import json
from typing import Any

import pytest

from proxy.formats.raw_json import parse_object
from proxy.formats.registry import FORMATS
from proxy.identity.identify import CODEX_TURN
from proxy.ingester.transcribe import transcribe
from proxy.side_calls import CODEX_KINDS, PROMPTS, Prompt, side_kind
from store.records import CallRecord
from tests.conftest import ROOT
from tests.support.recordings import FOLDER
from tests.support.records import captured

SENT = json.loads((FOLDER / "side_calls.json").read_text())
DIALECTS = {wire_format.path: name for name, wire_format in FORMATS.items()}
USER = {"role": "user", "content": "q"}
TOOLS = [{"type": "function", "function": {"name": "calc"}}]


def kind_of(dialect: str, request: dict[str, Any], body: bytes | None = None) -> str | None:
    body = json.dumps(request).encode() if body is None else body
    return side_kind(body, request, parse_object(body), FORMATS[dialect].turns)


def chat(*messages: Any, **others: Any) -> str | None:
    return kind_of("chat", {"model": "m", "messages": list(messages), **others})


def by_system(text: Any, **others: Any) -> str | None:
    return chat({"role": "system", "content": text}, USER, **others)


@pytest.mark.parametrize("sent", SENT, ids=lambda sent: f"{sent['client']}-{sent['kind']}")
@pytest.mark.parametrize("as_sent", [True, False], ids=["compact", "spaced"])
def test_side_calls_of_real_clients_are_told_from_their_work(sent: Any, as_sent: bool) -> None:
    compact = json.dumps(sent["request"], separators=(",", ":"), ensure_ascii=False).encode()
    body = compact if as_sent else json.dumps(sent["request"], indent=1).encode()
    assert kind_of(DIALECTS[sent["path"]], sent["request"], body) == sent["kind"]


@pytest.mark.parametrize("kind", [*sorted(CODEX_KINDS), "turn", "review", "", None, 7])
def test_kind_of_a_side_call_is_read_from_codexs_metadata(kind: Any) -> None:
    metadata = {CODEX_TURN: json.dumps({"request_kind": kind, "agent_name": "/root"})}
    request = {"model": "m", "input": "q", "client_metadata": metadata}
    assert kind_of("responses", request) == (kind if kind in CODEX_KINDS else None)


@pytest.mark.parametrize(
    "metadata",
    [None, "compaction", [], {}, {CODEX_TURN: None}, {CODEX_TURN: "{"}, {CODEX_TURN: "[1]"}],
)
def test_malformed_codex_metadata_states_no_kind_of_side_call(metadata: Any) -> None:
    request = {"model": "m", "input": f"what is {CODEX_TURN}?", "client_metadata": metadata}
    assert kind_of("responses", request) is None


@pytest.mark.parametrize(
    ("kind", "beginning"), sorted({(one.kind, one.beginning) for one in PROMPTS})
)
def test_side_calls_prompt_is_recognised_only_in_its_own_message(kind: str, beginning: str) -> None:
    text = f"{beginning} and so on"
    said, system = {"role": "user", "content": text}, {"role": "system", "content": text}
    done = {"role": "assistant", "content": "done"}
    by_user = kind if Prompt(kind, beginning, True) in PROMPTS else None
    alone = kind if Prompt(kind, beginning) in PROMPTS else None
    assert chat(USER, done, said, tools=TOOLS) == by_user
    assert chat(USER, done, said) == by_user
    # A later turn of the user's shows that the thread went on.
    assert chat(said, done, USER, tools=TOOLS) is None
    assert chat(system, USER) == alone
    # An agent that works with tools.
    assert chat(system, USER, tools=TOOLS) is None
    assert chat(USER, done, system, USER) is None
    quoted = f"What does this prompt do? {text}"
    assert by_system(quoted) is None
    assert chat({"role": "user", "content": quoted}) is None
    assert chat(USER, {"role": "assistant", "content": text}) is None
    assert chat(USER, {"role": "tool", "tool_call_id": "c", "content": text}) is None


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": [{"role": "system", "content": "Say if the text is spam."}, USER]},
        {"messages": [USER], "max_tokens": 1},
        {"messages": [{"role": "system", "content": "You are a title generator."}, USER]},
        {
            "messages": [
                {"role": "user", "content": "Summarize what was done in this conversation."}
            ]
        },
    ],
    ids=["classifier", "short limit", "agent that finds titles", "question for a summary"],
)
def test_call_without_tools_is_no_side_call(request_: dict[str, Any]) -> None:
    assert kind_of("chat", {"model": "m"} | request_) is None


def test_recorded_calls_of_agent_frameworks_are_no_side_calls() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "recordings" / "stitching.json").read_text())
    exchanges = [
        exchange
        for framework in recorded.values()
        for run in framework["runs"].values()
        for exchange in run
    ]
    assert len(exchanges) > 20
    assert {kind_of(one["dialect"], one["body"]) for one in exchanges} == {None}


def test_bodies_that_cannot_be_read_are_no_side_calls() -> None:
    beginning = PROMPTS[0].beginning
    turns = FORMATS["chat"].turns
    for body in (
        f'"{beginning}"',
        f'{{"messages": "{beginning}"}}',
        f'{{"messages": ["{beginning}"]}}',
        f'{{"messages": [{{"role": {{}}, "content": "{beginning}"}}]}}',
        f'{{"messages": [{{"role": "system", "content": "{beginning}\\ud800"}}]}}',
    ):
        assert side_kind(body.encode(), {}, parse_object(body.encode()), turns) is None


def recorded_call(kind: str, **changes: Any) -> CallRecord:
    [sent] = [one for one in SENT if (one["client"], one["kind"]) == ("OpenCode", kind)]
    return transcribe(captured(request=json.dumps(sent["request"]).encode(), **changes))


def test_side_call_is_recorded_with_its_kind_and_not_trainable() -> None:
    call = recorded_call("title")
    assert (call.trainable, call.reason, call.side) == (False, "side", "title")


def test_side_call_that_failed_counts_as_failed() -> None:
    call = recorded_call("compaction", http_status=500)
    assert (call.reason, call.side) == ("error_reply", "compaction")
