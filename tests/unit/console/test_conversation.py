"""What was said in a call is shown, whatever its wire format; each call as what it adds."""

import json
from typing import Any

import pytest

from console.conversation import (
    MOST_MESSAGES,
    MOST_PARTS,
    Message,
    Space,
    Turn,
    reply_in,
    turn_of,
)
from store.read.detail import CallTexts

Words = list[tuple[str, list[tuple[str, str, str]]]]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "q"}
CALL = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}


def words(messages: tuple[Message, ...] | None) -> Words:
    return [
        (message.role, [(part.kind, part.title, part.text) for part in message.parts])
        for message in messages or ()
    ]


def asking(fields: Any, before: Any = None, reply: Any = None) -> Turn:
    def encoded(body: Any) -> bytes | None:
        return None if body is None else json.dumps(body).encode()

    base = CallTexts(encoded(before), encoded(reply))
    return turn_of(CallTexts(encoded(fields), None), base)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {
                "messages": [
                    SYSTEM,
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "q"},
                            {"type": "image_url", "image_url": {"url": "x"}},
                        ],
                    },
                    {
                        "role": "assistant",
                        "content": None,
                        "reasoning_content": "hm",
                        "tool_calls": [CALL],
                    },
                    {"role": "tool", "tool_call_id": "t1", "content": "2"},
                ]
            },
            [
                ("system", [("text", "", "Be brief.")]),
                (
                    "user",
                    [
                        ("text", "", "q"),
                        ("media", "image_url", '{"type":"image_url","image_url":{"url":"x"}}'),
                    ],
                ),
                ("assistant", [("thought", "", "hm"), ("call", "add", '{"a":1}')]),
                ("tool", [("result", "", "2")]),
            ],
        ),
        ({"prompt": "Once"}, [("user", [("text", "", "Once")])]),
        ({"prompt": [1, 2]}, [("user", [("other", "", "[1,2]")])]),
        (
            {
                "instructions": "Be brief.",
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                    {"type": "function_call", "call_id": "t1", "name": "add", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "t1", "output": "2"},
                    {"type": "screen", "x": 1},
                ],
            },
            [
                ("system", [("text", "", "Be brief.")]),
                ("user", [("text", "", "q")]),
                ("assistant", [("thought", "", "hm")]),
                ("assistant", [("call", "add", "{}")]),
                ("tool", [("result", "", "2")]),
                ("assistant", [("other", "screen", '{"type":"screen","x":1}')]),
            ],
        ),
        ({"input": "q"}, [("user", [("text", "", "q")])]),
        (
            {
                "system": [{"type": "text", "text": "Be brief."}],
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "hm"},
                            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t1",
                                "content": [{"type": "text", "text": "2"}],
                                "is_error": True,
                            }
                        ],
                    },
                ],
            },
            [
                ("system", [("text", "", "Be brief.")]),
                ("user", [("text", "", "q")]),
                ("assistant", [("thought", "", "hm"), ("call", "add", '{"a":1}')]),
                ("user", [("result", "error", "2")]),
            ],
        ),
        ({"messages": "?", "tools": 7}, [("user", [("text", "", "?")])]),
        (
            {"messages": [None, 3, {"role": 4}]},
            [("user", []), ("user", [("other", "", "3")]), ("user", [("other", "", '{"role":4}')])],
        ),
        ({"questions": [USER]}, []),
    ],
)
def test_request_is_shown_message_by_message(fields: Any, expected: Words) -> None:
    assert words(asking(fields).messages) == expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (
            {"choices": [{"message": {"role": "assistant", "content": "a", "tool_calls": [CALL]}}]},
            [("assistant", [("text", "", "a"), ("call", "add", '{"a":1}')])],
        ),
        (
            {"choices": [{"text": "a"}, {"text": "b"}]},
            [("assistant", [("text", "", "a")]), ("assistant", [("text", "", "b")])],
        ),
        (
            {
                "output": [
                    {
                        "type": "message",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "a"}],
                    }
                ]
            },
            [("assistant", [("text", "", "a")])],
        ),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
            [("assistant", [("text", "", "a")])],
        ),
        (
            {"error": {"message": "no"}},
            [("error", [("other", "", '{"error": {"message": "no"}}')])],
        ),
    ],
)
def test_reply_of_every_wire_format_is_shown(reply: Any, expected: Words) -> None:
    assert words(reply_in(json.dumps(reply).encode())) == expected


@pytest.mark.parametrize("body", [b"\xff<script>", b"[1", b"[" * 500 + b"]" * 500])
def test_reply_that_is_no_json_is_shown_as_text(body: bytes) -> None:
    turn = turn_of(CallTexts(body, body))
    assert turn.reply[0].parts[0].text == body.decode(errors="replace")
    assert turn.messages is None


def test_call_is_shown_as_its_additions_to_the_previous_call() -> None:
    reply = {"role": "assistant", "content": "a"}
    before = {"messages": [SYSTEM, USER]}
    whole = {"choices": [{"message": reply}]}
    more = asking(
        {"messages": [SYSTEM, USER, reply, {"role": "user", "content": "r"}]}, before, whole
    )
    assert (more.same, more.left_out, more.repeats_reply) == (2, 0, True)
    assert words(more.messages) == [("user", [("text", "", "r")])]
    # The agent changed the reply, and then shortened its history.
    edited = asking({"messages": [SYSTEM, USER, {**reply, "content": "b"}]}, before, whole)
    assert (edited.same, edited.repeats_reply, len(edited.messages)) == (2, False, 1)
    summary = asking({"messages": [SYSTEM, {"role": "user", "content": "so far: …"}]}, before)
    assert (summary.same, summary.left_out) == (1, 1)


def test_only_the_first_and_last_messages_of_a_long_request_are_shown() -> None:
    many = [{"role": "user", "content": str(number)} for number in range(1000)]
    shown = asking({"messages": many})
    assert (len(shown.messages), shown.more) == (MOST_MESSAGES, 1000 - MOST_MESSAGES)
    assert [shown.messages[0].parts[0].text, shown.messages[-1].parts[0].text] == ["0", "999"]


def test_page_limits_characters_in_total_and_for_each_text() -> None:
    said = asking({"prompt": "x" * 10_000}).messages
    space = Space(5000, 3000)
    fitted = [list(space.fit(said[0].parts)) for _ in range(3)]
    assert [shown for [(_, shown)] in fitted] == [3000, 2000, 0]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{}] * 50_000},
        {"role": "assistant", "tool_calls": [CALL] * 50_000},
    ],
)
def test_only_the_first_parts_of_a_long_message_are_shown(message: Any) -> None:
    [said] = asking({"messages": [message]}).messages
    assert len(said.parts) == MOST_PARTS + 1
    assert (said.parts[-1].kind, said.parts[-1].title) == ("more", "what follows is not shown")


@pytest.mark.parametrize("reply", [{"choices": [{"text": "a"}] * 1000}, {"output": [{}] * 1000}])
def test_only_the_first_messages_of_a_long_reply_are_shown(reply: Any) -> None:
    said = reply_in(json.dumps(reply).encode())
    assert len(said) == MOST_MESSAGES + 1
    assert said[-1].parts[0].title == "what follows is not shown"


def test_nested_message_parts_are_limited_like_a_flat_list() -> None:
    nested: list[Any] = [{"content": [{"content": [{}] * 100}] * 100}] * 10
    [said] = asking({"messages": [{"role": "user", "content": nested}]}).messages
    assert len(said.parts) == MOST_PARTS + 1
    assert said.parts[-1].title == "what follows is not shown"


def test_page_limits_the_number_of_shown_message_parts() -> None:
    said = asking({"messages": [{"role": "user", "content": [{}] * 10}]}).messages
    space = Space(5000, 3000, parts=15)
    fitted = [list(space.fit(said[0].parts)) for _ in range(3)]
    assert [len(parts) for parts in fitted] == [10, 6, 1]
    assert fitted[1][-1][0].title == "what follows is not shown"
