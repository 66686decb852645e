"""Results of tools in the next call's request, in every api: read once, and only theirs."""

import json
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import tool_events as tool_results
from proxy.formats.conversation import ToolResult
from proxy.formats.raw_json import parse_object
from proxy.formats.registry import FORMATS
from proxy.ingester.transcribe import transcribe
from proxy.tool_events import ResultReaders, parse_readers
from store.records import ToolEvent
from tests.support.records import captured, tool_event

CALL = uuid4()
OFF = parse_readers("")
ON = parse_readers("*=json_error")
Said = dict[str, Any]
# (id, tool, what came back)
Turn = list[tuple[str, str, str]]


def chat(turns: list[Turn], *after: Said) -> Said:
    messages: list[Said] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    for turn in turns:
        calls = [
            {"id": i, "type": "function", "function": {"name": name, "arguments": "{}"}}
            for i, name, _ in turn
        ]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": i, "content": text} for i, _, text in turn]
    return {"messages": [*messages, *after]}


def responses(turns: list[Turn], *after: Said) -> Said:
    items: list[Said] = [{"role": "user", "content": "q"}]
    for turn in turns:
        items.append({"type": "reasoning", "id": "r", "summary": []})
        items += [
            {"type": "function_call", "call_id": i, "name": name, "arguments": "{}"}
            for i, name, _ in turn
        ]
        items += [{"type": "function_call_output", "call_id": i, "output": t} for i, _, t in turn]
    return {"input": [*items, *after]}


def messages(turns: list[Turn], *after: Said, **stated: bool) -> Said:
    said: list[Said] = [{"role": "user", "content": "q"}]
    for turn in turns:
        said.append(
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": i, "name": name, "input": {}} for i, name, _ in turn
                ],
            }
        )
        results = [
            {"type": "tool_result", "tool_use_id": i, "content": text} for i, _, text in turn
        ]
        said.append({"role": "user", "content": [r | stated for r in results]})
    return {"messages": [*said, *after]}


WRITERS = {"chat": chat, "responses": responses, "messages": messages}
every_format = pytest.mark.parametrize("api", list(WRITERS))


def parsed(request: Any) -> Any:
    return parse_object(json.dumps(request).encode())


def results(api: str, request: Any) -> list[ToolResult]:
    return FORMATS[api].turns.results(parsed(request))


def result_events(
    call: UUID, api: str, request: Any, readers: ResultReaders
) -> tuple[ToolEvent, ...]:
    return tool_results.result_events(call, FORMATS[api].turns, request, readers)


def events(api: str, request: Any, rules: str = "") -> list[tuple[str, str, str, str | None]]:
    found = result_events(CALL, api, parsed(request), parse_readers(rules))
    return [(e.tool_id or "", e.status, e.source, e.name) for e in found]


FIRST: Turn = [("a", "search", '{"error": "x"}'), ("b", "shell", "Exit code 2")]
SECOND: Turn = [("c", "search", "{}")]


@every_format
def test_results_are_read_with_their_tools_names(api: str) -> None:
    assert results(api, WRITERS[api]([FIRST])) == [
        ToolResult(tool_id="a", name="search", text='{"error": "x"}'),
        ToolResult(tool_id="b", name="shell", text="Exit code 2"),
    ]


@every_format
def test_only_what_answers_the_last_turn_is_read(api: str) -> None:
    request = WRITERS[api]([FIRST, SECOND])
    assert [result.tool_id for result in results(api, request)] == ["c"]


@every_format
def test_what_a_user_adds_changes_nothing(api: str) -> None:
    request = WRITERS[api]([FIRST, SECOND], {"role": "user", "content": "go on"})
    assert [result.tool_id for result in results(api, request)] == ["c"]


@every_format
def test_words_put_into_the_assistants_mouth_change_nothing(api: str) -> None:
    request = WRITERS[api]([FIRST, SECOND], {"role": "assistant", "content": "So"})
    assert [result.tool_id for result in results(api, request)] == ["c"]


@every_format
def test_a_turn_that_was_answered_by_words_leaves_no_result(api: str) -> None:
    later = ({"role": "assistant", "content": "done"}, {"role": "user", "content": "thanks"})
    assert results(api, WRITERS[api]([FIRST], *later)) == []


@every_format
def test_a_call_that_came_to_no_result_is_no_event(api: str) -> None:
    request = WRITERS[api]([FIRST])
    [kind] = request
    if api == "messages":
        request[kind][-1]["content"].pop()
    else:
        request[kind].pop()
    assert [result.tool_id for result in results(api, request)] == ["a"]


@every_format
def test_readers_read_tool_by_tool(api: str) -> None:
    assert events(api, WRITERS[api]([FIRST]), "search=json_error,shell=exit_code") == [
        ("a", "error", "reader", "search"),
        ("b", "error", "reader", "shell"),
    ]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_nobody_reads_results_unless_told_to(api: str) -> None:
    assert events(api, WRITERS[api]([FIRST])) == []
    assert events(api, WRITERS[api]([FIRST]), "shell=exit_code") == [
        ("b", "error", "reader", "shell")
    ]


def test_is_error_is_a_statement_and_goes_before_what_is_read() -> None:
    stated_ok = messages([FIRST], is_error=False)
    stated_error = messages([SECOND], is_error=True)
    for rules in ("", "*=json_error", "*=ignore"):
        assert [e[1:3] for e in events("messages", stated_ok, rules)] == [("ok", "is_error")] * 2
        assert [e[1:3] for e in events("messages", stated_error, rules)] == [("error", "is_error")]


def test_without_is_error_the_apis_default_is_assumed_where_nothing_is_read() -> None:
    request = messages([FIRST])
    assert events("messages", request) == [
        ("a", "ok", "assumed", "search"),
        ("b", "ok", "assumed", "shell"),
    ]
    assert events("messages", request, "search=json_error,shell=ignore") == [
        ("a", "error", "reader", "search")
    ]


def test_a_result_without_a_name_in_the_request_takes_the_rules_of_any_tool() -> None:
    output = {"type": "function_call_output", "call_id": "a", "output": '{"error": 1}'}
    request = {"previous_response_id": "r", "input": [output]}
    assert events("responses", request, "search=json_error") == []
    assert events("responses", request, "*=json_error") == [("a", "error", "reader", None)]


def test_custom_tools_are_read_too() -> None:
    items = [
        {"type": "custom_tool_call", "call_id": "a", "name": "sh", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "Exit code 1"},
    ]
    assert events("responses", {"input": items}, "sh=exit_code") == [("a", "error", "reader", "sh")]
    call = {"id": "a", "type": "custom", "custom": {"name": "sh", "input": "ls"}}
    said = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "Exit code 1"},
    ]
    assert events("chat", {"messages": said}, "sh=exit_code") == [("a", "error", "reader", "sh")]


@pytest.mark.parametrize(
    ("api", "content"),
    [
        ("chat", [{"type": "text", "text": '{"error"'}, {"type": "text", "text": ":1}"}]),
        ("messages", [{"type": "text", "text": '{"error"'}, {"type": "text", "text": ":1}"}]),
        ("responses", [{"type": "input_text", "text": '{"error":1}'}, {"type": "input_image"}]),
    ],
)
def test_content_in_parts_is_put_together(api: str, content: Any) -> None:
    request = WRITERS[api]([[("a", "t", content)]])
    assert [e[1] for e in events(api, request, "t=json_error")] == ["error"]


def test_the_last_result_of_a_call_counts() -> None:
    request = chat([SECOND], {"role": "tool", "tool_call_id": "c", "content": '{"error": 1}'})
    assert [e[1] for e in events("chat", request, "*=json_error")] == ["error"]


@pytest.mark.parametrize("tool_id", [None, "", 3, "a\x00", "x" * 1025])
def test_a_result_of_nobody_knows_what_is_no_event(tool_id: Any) -> None:
    request = chat([], {"role": "tool", "tool_call_id": tool_id, "content": '{"error": 1}'})
    assert events("chat", request, "*=json_error") == []


@pytest.mark.parametrize("api", list(FORMATS))
@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"messages": 3}', b'{"input": "q"}'])
def test_what_holds_no_results_gives_none(api: str, body: bytes) -> None:
    assert result_events(CALL, api, parse_object(body), ON) == ()


def test_completions_have_no_tools() -> None:
    assert result_events(CALL, "completions", parsed(chat([FIRST])), ON) == ()


def test_a_member_that_cannot_be_read_tells_nothing() -> None:
    body = json.dumps(chat([SECOND])).encode().replace(b'"{}"', b'"{}", "x": 1e999')
    assert result_events(CALL, "chat", parse_object(body), ON) == ()


def test_the_same_call_gives_the_same_ids_and_another_call_others() -> None:
    request = parsed(chat([FIRST]))
    once, again = (result_events(CALL, "chat", request, ON) for _ in range(2))
    assert once == again
    other = result_events(uuid4(), "chat", request, ON)
    assert not {e.id for e in once} & {e.id for e in other}


# Through the ingester


def transcribed(api: str, request: Any, rules: str = "", **changes: Any) -> list[ToolEvent]:
    seen = captured(dialect=api, request=json.dumps(request).encode(), **changes)
    return list(transcribe(seen, parse_readers(rules)).tool_events)


@every_format
def test_the_ingester_reads_them(api: str) -> None:
    found = transcribed(api, WRITERS[api]([FIRST]), "*=json_error+exit_code")
    assert [(e.tool_id, e.status, e.source) for e in found] == [
        ("a", "error", "reader"),
        ("b", "error", "reader"),
    ]


def test_the_ingester_keeps_what_the_header_said_beside_it() -> None:
    told = (tool_event("denied", "a"),)
    found = transcribed("messages", messages([SECOND]), tool_events=told)
    assert [(e.tool_id, e.status, e.source) for e in found] == [
        ("a", "denied", "header"),
        ("c", "ok", "assumed"),
    ]


def test_a_call_that_came_to_no_reply_still_brought_its_results() -> None:
    found = transcribed(
        "messages", messages([SECOND], is_error=True), status="upstream_error", http_status=None
    )
    assert [e.status for e in found] == ["error"]


# Any request at all

TURNS = st.lists(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from(["t", "u"]), st.text(max_size=8)),
        min_size=1,
        max_size=3,
        unique_by=lambda result: result[0],
    ),
    max_size=4,
)


@given(st.sampled_from(list(WRITERS)), TURNS)
def test_a_thread_tells_of_each_result_once(api: str, turns: list[Turn]) -> None:
    told = [
        result
        for length in range(len(turns) + 1)
        for result in results(api, WRITERS[api](turns[:length]))
    ]
    assert [(r.tool_id, r.name, r.text) for r in told] == [r for turn in turns for r in turn]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
FIELDS = {
    "role": st.sampled_from(["user", "assistant", "tool", "system"]) | JSON,
    "type": st.sampled_from(["function_call", "function_call_output", "tool_result"]) | JSON,
    "content": st.lists(
        st.fixed_dictionaries(
            {}, optional={"type": st.sampled_from(["tool_result", "tool_use"]), "id": JSON}
        )
    )
    | JSON,
    **dict.fromkeys(("tool_calls", "call_id", "tool_call_id", "output", "name", "is_error"), JSON),
}


@given(
    st.sampled_from(list(FORMATS)),
    st.lists(st.fixed_dictionaries({}, optional=FIELDS) | JSON, max_size=6),
)
def test_any_request_is_read(api: str, members: list[Any]) -> None:
    request = parsed({"messages": members, "input": members})
    for event in result_events(CALL, api, request, parse_readers("*=json_error+exit_code")):
        assert event.tool_id
        assert "\x00" not in event.tool_id + (event.name or "") + (event.detail or "")
