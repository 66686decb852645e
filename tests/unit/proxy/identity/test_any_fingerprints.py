"""Fingerprints of any conversation: rebuilt it is the same, another one is another."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.conversation import canonical_arguments, is_unique
from proxy.formats.registry import FORMATS
from tests.unit.proxy.identity.test_fingerprints import (
    ADD,
    ID,
    OTHER_ID,
    Message,
    assistant,
    chat,
    needed_fingerprints,
    prefixes,
    provided_fingerprints,
    result,
    summary,
    user,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
SPOKEN = TEXTS.filter(lambda text: "</think>" not in text and bool(text.strip()))
IDS = st.sampled_from([ID, OTHER_ID, "call_1", "call_2"])
ARGUMENTS = st.dictionaries(
    TEXTS, st.integers(-9, 9) | TEXTS | st.none() | st.booleans(), max_size=3
)
STEPS = st.one_of(
    st.tuples(st.just("user"), TEXTS),
    st.tuples(st.just("assistant"), SPOKEN),
    st.tuples(st.just("call"), st.tuples(IDS, ARGUMENTS)),
    st.tuples(st.just("result"), st.tuples(IDS, TEXTS)),
)


def as_sent(
    steps: list[tuple[str, Any]], rebuilt: Callable[[str], Any], dump: Any
) -> list[Message]:
    """The steps as a chat's messages, contents and arguments written as a client would."""
    messages: list[Message] = []
    for kind, what in steps:
        if kind == "call":
            messages.append(assistant(None, (what[0], "f", dump(what[1]))))
        elif kind == "result":
            messages.append(result(what[0], rebuilt(what[1])))
        else:
            messages.append({"role": kind, "content": rebuilt(what)})
    return messages


@given(st.lists(STEPS, max_size=8))
def test_every_conversation_survives_being_rebuilt(steps: list[tuple[str, Any]]) -> None:
    plain = as_sent(steps, lambda text: text, json.dumps)
    parts = as_sent(
        steps,
        lambda text: [{"type": "text", "text": text}],
        lambda value: json.dumps(dict(reversed(value.items())), ensure_ascii=False, indent=1),
    )
    assert needed_fingerprints("chat", chat(*plain)) == needed_fingerprints("chat", chat(*parts))
    assert provided_fingerprints("chat", chat(*plain), summary("a")) == provided_fingerprints(
        "chat", chat(*parts), summary("a")
    )


@given(st.lists(STEPS, max_size=6), st.lists(STEPS, max_size=6))
def test_different_conversations_differ(
    one: list[tuple[str, Any]], other: list[tuple[str, Any]]
) -> None:
    fingerprints = [
        prefixes(
            provided_fingerprints("chat", chat(*as_sent(steps, str, json.dumps)), summary("a"))
        )
        for steps in (one, other)
    ]
    assert (fingerprints[0] == fingerprints[1]) == (told(one) == told(other))


def told(steps: list[tuple[str, Any]]) -> list[Any]:
    """What counts of a conversation: words by whom, calls, results; runs of replies are one."""
    found: list[Any] = []
    for kind, what in [*steps, ("assistant", "a")]:
        if kind in ("assistant", "call"):
            if not found or found[-1][0] != "said":
                found.append(("said", [], []))
            if kind == "assistant":
                found[-1][1].append(what.strip())
            else:
                unique = is_unique(what[0])
                found[-1][2].append(
                    what[0] if unique else (what[0], json.dumps(what[1], sort_keys=True))
                )
        elif kind == "result":
            found.append(("result", what[0], None if is_unique(what[0]) else what[1]))
        else:
            found.append(("user", what))
    return [
        ("said", "".join(entry[1]), entry[2]) if entry[0] == "said" else entry for entry in found
    ]


@given(st.lists(STEPS, max_size=8), SPOKEN)
def test_what_a_call_provides_the_next_one_needs(steps: list[tuple[str, Any]], reply: str) -> None:
    messages = as_sent([*steps, ("user", "q")], str, json.dumps)
    provides = provided_fingerprints("chat", chat(*messages), summary(reply))
    needs = needed_fingerprints("chat", chat(*messages, assistant(reply), user("next")))
    assert prefixes(needs)[0] == provides[-1]


@given(st.lists(STEPS, max_size=8))
def test_reading_once_for_both_is_reading_twice(steps: list[tuple[str, Any]]) -> None:
    fields = chat(*as_sent(steps, str, json.dumps))
    read = FORMATS["chat"].turns.read(fields)
    assert needed_fingerprints("chat", fields, read) == needed_fingerprints("chat", fields)
    assert provided_fingerprints("chat", fields, summary("a"), read) == provided_fingerprints(
        "chat", fields, summary("a")
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1,"b":2.0}', '{ "b": 2, "a": 1.0 }'),
        ("", "{}"),
        (None, {}),
        ('{"a":"ä"}', '{"a":"\\u00e4"}'),
        ("not json ", "not json"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_are_compared_parsed(one: Any, other: Any) -> None:
    assert canonical_arguments(one) == canonical_arguments(other)


KEYS = [
    *("role", "content", "type", "text", "id", "name", "tool_calls", "function", "arguments"),
    *("input", "output", "tool_call_id", "call_id", "tool_use_id"),
]
WORDS = st.sampled_from(["assistant", "user", "tool", "tool_result", "tool_use", "function_call"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=14),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner | WORDS)
    ),
)


@given(JSON, JSON, JSON)
def test_any_request_can_be_read(messages: Any, given_input: Any, previous: Any) -> None:
    fields = {"messages": messages, "input": given_input, "previous_response_id": previous}
    for name in FORMATS:
        signs = needed_fingerprints(name, fields) + provided_fingerprints(
            name, fields, summary("a", ADD)
        )
        assert all(len(sign) == 16 for sign in signs)
