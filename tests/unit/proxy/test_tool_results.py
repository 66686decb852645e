"""Results of tools in the next call's request, in every format: read once, with what they quote."""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
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
from proxy.tool_events import MOST_QUOTES, ResultReaders, parse_readers, quoted_digests, text_digest
from store.records import CallRecord, ToolEvent
from tests.support.records import captured, tool_event

CALL = uuid4()
OFF = parse_readers("")
ON = parse_readers("*=json_error")
Said = dict[str, Any]
# (id, tool, what came back)
Turn = list[tuple[str, str, str]]


def chat(turns: list[Turn], *after: Said, arguments: Any = MappingProxyType({})) -> Said:
    messages: list[Said] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    for turn in turns:
        calls = [
            {"id": i, "type": "function", "function": {"name": name, "arguments": dump(arguments)}}
            for i, name, _ in turn
        ]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": i, "content": text} for i, _, text in turn]
    return {"messages": [*messages, *after]}


def responses(turns: list[Turn], *after: Said, arguments: Any = MappingProxyType({})) -> Said:
    items: list[Said] = [{"role": "user", "content": "q"}]
    for turn in turns:
        items.append({"type": "reasoning", "id": "r", "summary": []})
        items += [
            {"type": "function_call", "call_id": i, "name": name, "arguments": dump(arguments)}
            for i, name, _ in turn
        ]
        items += [{"type": "function_call_output", "call_id": i, "output": t} for i, _, t in turn]
    return {"input": [*items, *after]}


def messages(
    turns: list[Turn], *after: Said, arguments: Any = MappingProxyType({}), **stated: bool
) -> Said:
    said: list[Said] = [{"role": "user", "content": "q"}]
    for turn in turns:
        calls = [
            {"type": "tool_use", "id": i, "name": name, "input": dict(arguments)}
            for i, name, _ in turn
        ]
        results = [
            {"type": "tool_result", "tool_use_id": i, "content": text} for i, _, text in turn
        ]
        said += [
            {"role": "assistant", "content": calls},
            {"role": "user", "content": [result | stated for result in results]},
        ]
    return {"messages": [*said, *after]}


def custom(given: Any, output: str) -> Said:
    call = {"type": "custom_tool_call", "call_id": "a", "name": "sh", "input": given}
    return {"input": [call, {"type": "custom_tool_call_output", "call_id": "a", "output": output}]}


def custom_in_a_chat(given: Any, output: str) -> Said:
    call = {"id": "a", "type": "custom", "custom": {"name": "sh", "input": given}}
    result = {"role": "tool", "tool_call_id": "a", "content": output}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}, result]}


WRITERS = {"chat": chat, "responses": responses, "messages": messages}
every_format = pytest.mark.parametrize("api", list(WRITERS))


def dump(arguments: Any) -> str:
    return json.dumps(dict(arguments) if isinstance(arguments, Mapping) else arguments)


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
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_tool_results_are_found_before_a_trailing_text_message(api: str, role: str) -> None:
    request = WRITERS[api]([FIRST, SECOND], {"role": role, "content": "go on"})
    assert [result.tool_id for result in results(api, request)] == ["c"]


@every_format
def test_tool_results_before_the_newest_reply_are_not_read(api: str) -> None:
    later = ({"role": "assistant", "content": "done"}, {"role": "user", "content": "thanks"})
    assert results(api, WRITERS[api]([FIRST], *later)) == []


@every_format
def test_tool_call_without_a_result_is_no_event(api: str) -> None:
    request = WRITERS[api]([FIRST])
    [kind] = request
    if api == "messages":
        request[kind][-1]["content"].pop()
    else:
        request[kind].pop()
    assert [result.tool_id for result in results(api, request)] == ["a"]


@every_format
def test_results_of_each_tool_are_read_by_that_tools_rule(api: str) -> None:
    assert events(api, WRITERS[api]([FIRST]), "search=json_error,shell=exit_code") == [
        ("a", "error", "reader", "search"),
        ("b", "error", "reader", "shell"),
    ]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_tool_results_are_read_only_with_a_rule_for_their_tool(api: str) -> None:
    assert events(api, WRITERS[api]([FIRST])) == []
    assert events(api, WRITERS[api]([FIRST]), "shell=exit_code") == [
        ("b", "error", "reader", "shell")
    ]


def test_is_error_overrides_rules() -> None:
    stated_ok = messages([FIRST], is_error=False)
    stated_error = messages([SECOND], is_error=True)
    for rules in ("", "*=json_error", "*=ignore"):
        assert [e[1:3] for e in events("messages", stated_ok, rules)] == [("ok", "is_error")] * 2
        assert [e[1:3] for e in events("messages", stated_error, rules)] == [("error", "is_error")]


def test_missing_is_error_means_ok_unless_a_rule_reads_the_result() -> None:
    request = messages([FIRST])
    assert events("messages", request) == [
        ("a", "ok", "assumed", "search"),
        ("b", "ok", "assumed", "shell"),
    ]
    assert events("messages", request, "search=json_error,shell=ignore") == [
        ("a", "error", "reader", "search")
    ]


def test_result_of_an_unnamed_tool_takes_the_wildcard_rules() -> None:
    output = {"type": "function_call_output", "call_id": "a", "output": '{"error": 1}'}
    request = {"previous_response_id": "r", "input": [output]}
    assert events("responses", request, "search=json_error") == []
    assert events("responses", request, "*=json_error") == [("a", "error", "reader", None)]


@pytest.mark.parametrize(
    ("api", "request_"),
    [("responses", custom("ls", "Exit code 1")), ("chat", custom_in_a_chat("ls", "Exit code 1"))],
)
def test_results_of_custom_tools_are_read_too(api: str, request_: Said) -> None:
    assert events(api, request_, "sh=exit_code") == [("a", "error", "reader", "sh")]


@pytest.mark.parametrize(
    ("api", "content"),
    [
        ("chat", [{"type": "text", "text": '{"error"'}, {"type": "text", "text": ":1}"}]),
        ("messages", [{"type": "text", "text": '{"error"'}, {"type": "text", "text": ":1}"}]),
        ("responses", [{"type": "input_text", "text": '{"error":1}'}, {"type": "input_image"}]),
    ],
)
def test_content_parts_of_a_tool_result_are_put_together(api: str, content: Any) -> None:
    request = WRITERS[api]([[("a", "t", content)]])
    assert [e[1] for e in events(api, request, "t=json_error")] == ["error"]


def test_last_result_of_a_tool_call_counts() -> None:
    request = chat([SECOND], {"role": "tool", "tool_call_id": "c", "content": '{"error": 1}'})
    assert [e[1] for e in events("chat", request, "*=json_error")] == ["error"]


@pytest.mark.parametrize("tool_id", [None, "", 3, "a\x00", "x" * 1025])
def test_tool_result_without_a_usable_id_is_no_tool_event(tool_id: Any) -> None:
    request = chat([], {"role": "tool", "tool_call_id": tool_id, "content": '{"error": 1}'})
    assert events("chat", request, "*=json_error") == []


@pytest.mark.parametrize("api", list(FORMATS))
@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"messages": 3}', b'{"input": "q"}'])
def test_request_without_tool_results_has_no_tool_events(api: str, body: bytes) -> None:
    assert result_events(CALL, api, parse_object(body), ON) == ()


def test_request_to_completions_has_no_tool_events() -> None:
    assert result_events(CALL, "completions", parsed(chat([FIRST])), ON) == ()


def test_request_with_an_unreadable_number_has_no_events() -> None:
    body = json.dumps(chat([SECOND])).encode().replace(b'"{}"', b'"{}", "x": 1e999')
    assert result_events(CALL, "chat", parse_object(body), ON) == ()


def test_tool_event_ids_are_the_same_for_a_call_read_twice_and_differ_between_calls() -> None:
    request = parsed(chat([FIRST]))
    once, again = (result_events(CALL, "chat", request, ON) for _ in range(2))
    assert once == again
    other = result_events(uuid4(), "chat", request, ON)
    assert not {e.id for e in once} & {e.id for e in other}


# Through the ingester


def recorded(api: str, request: Any, rules: str = "", **changes: Any) -> CallRecord:
    seen = captured(dialect=api, request=json.dumps(request).encode(), **changes)
    return transcribe(seen, parse_readers(rules))


def sources(record: CallRecord) -> list[tuple[str | None, str, str]]:
    return [(event.tool_id, event.status, event.source) for event in record.tool_events]


def test_ingester_keeps_tool_events_of_the_header_beside_tool_results() -> None:
    found = recorded("messages", messages([SECOND]), tool_events=(tool_event("denied", "a"),))
    assert sources(found) == [("a", "denied", "header"), ("c", "ok", "assumed")]


def test_tool_results_are_recorded_from_a_call_without_a_reply() -> None:
    request = messages([SECOND], is_error=True)
    found = recorded("messages", request, status="upstream_error", http_status=None)
    assert sources(found) == [("c", "error", "is_error")]


def calling(*wanted: tuple[str, str], tools: Any) -> CallRecord:
    """A chat whose request offers `tools` and whose reply calls tools by id and name."""
    calls = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for i, name in wanted
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
    reply = json.dumps({"id": "r", "choices": [choice]}).encode()
    request = {"model": "m", "messages": [{"role": "user", "content": "q"}], "tools": tools}
    return recorded("chat", request, reply=reply)


FUNCTION = {"type": "function", "function": {"name": "search"}}


@pytest.mark.parametrize(
    ("tools", "malformed"),
    [
        ([FUNCTION], ["b"]),
        ([FUNCTION, {"type": "custom", "custom": {"name": "serach"}}], []),
        ([{"name": "shell", "input_schema": {}}], ["a", "b"]),
        # Not all names are known.
        ([FUNCTION, {"type": "web_search"}], []),
        ([FUNCTION, {"type": "namespace", "name": "crm", "tools": []}], []),
        ([FUNCTION, 3], []),
        ([{"type": "function", "function": {"name": ["search"]}}], []),
        ([{"type": ["function"]}], []),
        ([], []),
        ({"search": FUNCTION}, []),
        (None, []),
    ],
)
def test_call_of_a_tool_that_its_request_does_not_offer_is_malformed(
    tools: Any, malformed: list[str]
) -> None:
    found = calling(("a", "search"), ("b", "serach"), tools=tools)
    assert sources(found) == [(i, "malformed", "not_offered") for i in malformed]


def test_message_that_adds_or_removes_a_tool_changes_the_offered_tools() -> None:
    search, other = ({"name": name, "input_schema": {}} for name in ("search", "other"))
    removes = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "search"}}
    added = {"type": "tool_definition", "definition": other}
    blocks = [removes, {"type": "tool_addition", "tool": added}]
    messages = [{"role": "user", "content": "q"}, {"role": "system", "content": blocks}]
    request = {"model": "m", "max_tokens": 9, "messages": messages, "tools": [search]}
    called = [
        {"type": "tool_use", "id": name, "name": name, "input": {}} for name in ("search", "other")
    ]
    reply = json.dumps({"id": "r", "type": "message", "content": called}).encode()
    found = recorded("messages", request, reply=reply, wanted_ids=False)
    assert sources(found) == [("search", "malformed", "not_offered")]


def test_tool_calls_with_the_same_id_have_a_single_event() -> None:
    """The id of an event is the primary key of its row."""
    found = calling(("a", "serach"), ("a", "find"), tools=[FUNCTION])
    assert sources(found) == [("a", "malformed", "not_offered")]


def test_tool_call_of_a_reply_that_was_cut_off_makes_no_tool_event() -> None:
    call = {"index": 0, "id": "a", "function": {"name": "sear", "arguments": ""}}
    event = {"id": "r", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}
    cut_off = {"reply": f"data: {json.dumps(event)}\n\n".encode(), "streamed": True}
    found = recorded("chat", {"tools": [FUNCTION]}, **cut_off, status="client_gone")
    assert [call.name for call in found.tool_calls] == ["sear"]
    assert sources(found) == []


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
def test_each_tool_result_of_a_conversation_is_read_once(api: str, turns: list[Turn]) -> None:
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
def test_any_request_is_read_for_tool_results_without_an_error(
    api: str, members: list[Any]
) -> None:
    request = parsed({"messages": members, "input": members})
    for event in result_events(CALL, api, request, parse_readers("*=json_error+exit_code")):
        assert event.tool_id
        assert "\x00" not in event.tool_id + (event.name or "") + (event.detail or "")


# Results of Codex 0.171.0, Qwen Code 0.24.4, Cline 3.0.65 and mini-swe-agent 2.4.6, as they sent
# them. `{}` stands for the exit code, and `@` for the command's own output.
CODEX = """Chunk ID: c2f635
Wall time: 0.0161 seconds
Process exited with code {}
Original token count: 42
Output:
@"""
CODEX_RUNS = CODEX.replace("exited with code {}", "running with session ID 7")
QWEN_CODE = """Command: pytest
-q
Directory: (root)
Output: @
Error: (none)
Exit Code: {}
Signal: (none)
Process Group PGID: 10023"""
QWEN_CODE_LONG = f"""Tool output was too large and has been truncated.
The full output has been saved to: /home/u/.qwen/tmp/c5863086/run_shell_command_b8589c31dc33.output
To read the complete output, use the read_file tool with the absolute file path above.
The truncated output below shows the beginning and end of the content. The marker '... [CONTENT \
TRUNCATED] ...' indicates where content was removed.

Truncated part of the output:
{QWEN_CODE}"""
QWEN_CODE_SLOW = f"""{QWEN_CODE}

Note: this foreground command ran for 70s. Next time you run a similar long-running process (build \
watchers, dev servers, soak tests, polling loops), pass `is_background: true`."""
QWEN_CODE_KILLED = QWEN_CODE.replace("{}\nSignal: (none)", "(none)\nSignal: 9")
QWEN_CODE_LATE = """Command timed out after 1500ms before it could complete. Below is the output \
before it timed out:
@"""
QWEN_CODE_CANCELLED = """Command was cancelled by user before it could complete. Below is the \
output before it was cancelled:
@"""


def cline(output: str, code: int) -> str:
    if not code:
        done = {"query": "pytest", "result": output, "success": True}
        return json.dumps([done])
    error = f"Command exited with code {code}"
    done = {"query": "pytest", "result": f"[{error}]\n{output}", "error": error, "success": False}
    return json.dumps([{"query": "ls", "result": "a", "success": True}, done])


def mini_swe_agent(output: str, code: int) -> str:
    return f'{{\n  "returncode": {code},\n  "output": {json.dumps(output)}\n}}'


def framed(frame: str) -> Callable[[str, int], str]:
    return lambda output, code: frame.replace("{}", str(code)).replace("@", output)


RESULTS_OF = {
    "codex": framed(CODEX),
    "qwen code": framed(QWEN_CODE),
    "qwen code, long": framed(QWEN_CODE_LONG),
    "qwen code, slow": framed(QWEN_CODE_SLOW),
    "cline": cline,
    "mini-swe-agent": mini_swe_agent,
}
OWN_RULES = {"codex": "codex", "qwen code": "qwen_code", "cline": "cline"}
# What a command may print that failed, or still runs: each client's result of one that succeeded.
IMITATIONS = [result("done", 0) for result in RESULTS_OF.values()]
OUTPUTS = ["", "exit code 7\n", "exit code: 0", *IMITATIONS, *(f"\n{text}" for text in IMITATIONS)]


def verdict(rule: str, text: str) -> str | None:
    reading = parse_readers(f"t={rule}").read("t", text)
    return None if reading is None else reading.status


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("client", list(RESULTS_OF))
def test_result_of_a_coding_agent_is_read_with_any_output(
    client: str, code: int, output: str
) -> None:
    rule = OWN_RULES.get(client.partition(",")[0], "exit_code")
    assert verdict(rule, RESULTS_OF[client](output, code)) == ("error" if code else "ok")


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(
    ("rule", "frame", "status"),
    [
        ("codex", CODEX_RUNS, None),
        ("codex", "exec_command failed for `@`: no such file", None),
        ("codex", "@", None),
        ("qwen_code", QWEN_CODE_KILLED, None),
        ("qwen_code", QWEN_CODE_CANCELLED, None),
        ("qwen_code", QWEN_CODE_LATE, "timeout"),
    ],
    ids=["runs", "not started", "bare", "killed", "cancelled", "late"],
)
def test_result_without_an_exit_code_is_no_success_with_any_output(
    rule: str, frame: str, status: str | None, output: str
) -> None:
    assert verdict(rule, framed(frame)(f"done\n{output}", 0)) == status


@pytest.mark.parametrize("client", ["codex", "qwen code", "qwen code, long", "qwen code, slow"])
@pytest.mark.parametrize("code", [0, 3])
def test_exit_code_in_a_coding_agents_frame_around_the_output_is_read(
    client: str, code: int
) -> None:
    text = RESULTS_OF[client]("exit code 7", code)
    reading = parse_readers("*=exit_code").read("t", text)
    assert reading is not None
    assert (reading.status, reading.detail) == ("error" if code else "ok", f"exit code {code}")


@pytest.mark.parametrize(
    "text",
    [
        "Command: true\n:\nProcess exited with code 0\nDirectory: (root)\nOutput: no",
        framed(CODEX_RUNS)("exit code: 0", 0),
        framed(QWEN_CODE_KILLED)("exit code: 0", 0),
    ],
    ids=["a command", "runs", "killed"],
)
def test_exit_code_in_the_output_is_not_read_if_the_agents_frame_states_none(text: str) -> None:
    assert verdict("exit_code", text) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[1]", '{"success": true}', '[{"query": "q", "success": true}]']
)
def test_tool_result_that_cline_does_not_write_has_no_status(text: str) -> None:
    assert verdict("cline", text) is None


ANY = "*=json_error"
SQL = "SELECT COUNT(*)\nFROM employee WHERE name = 'é'"
# Backticks alone are a fence, or what is left of one, and no text.
TEXTS = (
    st.text(min_size=1)
    .map(str.strip)
    .filter(lambda text: bool(text.strip("`")) and "```" not in text)
)


@given(TEXTS, st.sampled_from(["", " ", "\n", "\t\n"]))
def test_blanks_and_a_code_fence_around_a_text_do_not_change_its_digest(
    text: str, blanks: str
) -> None:
    assert text_digest(f"{blanks}{text}{blanks}") == text_digest(text) is not None
    assert text_digest(f"```sql\n{text}\n```{blanks}") == text_digest(text)


@given(TEXTS, TEXTS)
def test_only_equal_whole_texts_have_the_same_digest(text: str, other: str) -> None:
    assert (text_digest(text) == text_digest(other)) == (text == other)
    assert text_digest(f"{text}\n{other}") != text_digest(text)
    assert text_digest(f"See:\n```sql\n{text}\n```") != text_digest(text)


@pytest.mark.parametrize("text", ["", " \n", "`", "```sql\n```", "``````"])
def test_text_without_words_has_no_digest(text: str) -> None:
    assert text_digest(text) is None


def test_text_that_utf8_cannot_encode_has_a_digest() -> None:
    assert text_digest("\ud800") != text_digest("\ud801")


def test_digests_of_quoted_texts_are_distinct_and_limited_in_number() -> None:
    assert quoted_digests(("a", " a ", "", "b")) == (text_digest("a"), text_digest("b"))
    assert len(quoted_digests([str(number) for number in range(99)])) == MOST_QUOTES


# Texts that a tool call quotes


@pytest.mark.parametrize(
    ("api", "request_"),
    [
        (
            "chat",
            chat([SECOND], arguments={"query": SQL, "limit": 5, "in": {"text": "not on top"}}),
        ),
        ("messages", messages([SECOND], arguments={"query": f" {SQL}\n"})),
        ("responses", responses([SECOND], arguments={"query": SQL})),
        ("responses", custom(SQL, "{}")),
        ("chat", custom_in_a_chat(SQL, "{}")),
    ],
)
def test_tool_event_has_the_digests_of_the_texts_in_its_calls_arguments(
    api: str, request_: Said
) -> None:
    [event] = recorded(api, request_, ANY).tool_events
    assert event.quotes == (text_digest(SQL),)


@pytest.mark.parametrize("arguments", [3, None, [], {}, {"a": 1}, [SQL], "", {"": ""}])
def test_tool_arguments_without_a_text_give_no_quoted_digest(arguments: Any) -> None:
    [event] = recorded("chat", chat([SECOND], arguments=arguments), ANY).tool_events
    assert event.quotes == ()


def reply(message: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    return json.dumps({"id": "r", "choices": [choice]}).encode()


MESSAGE = {"id": "m", "type": "message", "content": [{"type": "text", "text": SQL}]}
ITEM = {"type": "message", "content": [{"type": "output_text", "text": SQL}]}
RESPONSE = {"id": "r", "object": "response", "status": "completed", "output": [ITEM]}
COMPLETION = {"id": "c", "choices": [{"index": 0, "text": SQL}]}


@pytest.mark.parametrize(
    ("dialect", "request_body", "told"),
    [
        ("chat", {"messages": []}, reply({"content": f"{SQL}\n"})),
        ("messages", {"messages": []}, json.dumps(MESSAGE).encode()),
        ("responses", {"input": []}, json.dumps(RESPONSE).encode()),
        ("completions", {"prompt": "q"}, json.dumps(COMPLETION).encode()),
    ],
)
def test_recorded_call_has_the_digest_of_its_replys_whole_text(
    dialect: str, request_body: Any, told: bytes
) -> None:
    made = recorded(dialect, request_body, ANY, reply=told)
    assert made.text_digest == text_digest(SQL)


def test_recorded_call_has_the_digest_of_its_streamed_replys_whole_text() -> None:
    chunks = [
        {"id": "r", "choices": [{"index": 0, "delta": {"content": piece}}]}
        for piece in (SQL[:5], SQL[5:])
    ]
    sent = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
    made = recorded(
        "chat",
        {"messages": [], "stream": True},
        ANY,
        reply=sent + b"data: [DONE]\n\n",
        streamed=True,
    )
    assert made.text_digest == text_digest(SQL)


def test_reply_with_tool_calls_has_no_text_digest() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "sql", "arguments": "{}"}}
    told = reply({"content": SQL, "tool_calls": [call]})
    assert recorded("chat", {"messages": []}, ANY, reply=told).text_digest is None


def test_reply_has_no_text_digest_if_no_tool_result_is_read() -> None:
    told = reply({"content": SQL})
    assert recorded("chat", {"messages": []}, reply=told).text_digest is None
