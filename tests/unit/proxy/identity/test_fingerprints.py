"""Fingerprints: a conversation is the same however a client sends it back, and no other is."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import ReplySummary
from proxy.formats.conversation import canonical_arguments, is_unique_id
from proxy.formats.registry import FORMATS
from proxy.identity import call_memory
from proxy.identity.call_memory import (
    PREFIX,
    PREFIXES,
    RESPONSE,
    TOOL_CALL,
    UNIQUE_PREFIX,
)
from store.records import ToolCall

ID, OTHER_ID = "chatcmpl-tool-0123456789abcdef", "toolu_01A09q90qw90lq917835"
Fields = dict[str, Any]
Message = dict[str, Any]


def needed_fingerprints(api: str, fields: Fields) -> tuple[bytes, ...]:
    return call_memory.needed_fingerprints(FORMATS[api].turns, fields)


def provided_fingerprints(api: str, fields: Fields, told: ReplySummary) -> tuple[bytes, ...]:
    return call_memory.provided_fingerprints(FORMATS[api].turns, fields, told)


def chat(*messages: Message) -> Fields:
    return {"model": "m", "messages": list(messages)}


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def assistant(text: Any, *calls: tuple[str, str, str], **more: Any) -> Message:
    told = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id_, name, arguments in calls
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": told} if told else {}), **more}


def result(tool_id: str, text: Any) -> Message:
    return {"role": "tool", "tool_call_id": tool_id, "content": text}


def summary(
    text: str = "", *calls: tuple[str, str, str], response_id: str | None = None
) -> ReplySummary:
    told = tuple(ToolCall(id=id_, name=name, arguments=text_) for id_, name, text_ in calls)
    return ReplySummary(response_id, text, told)


def prefixes(fingerprints: tuple[bytes, ...]) -> list[bytes]:
    return [one for one in fingerprints if one[0] in PREFIXES]


def kinds(fingerprints: tuple[bytes, ...]) -> list[int]:
    return [one[0] for one in fingerprints]


ADD = (ID, "add", '{"a": 1, "b": 2.0}')
COUNTER = ("call_1", "add", '{"a": 1, "b": 2.0}')

# How clients send back an assistant's "Let me see." with a call of a tool.
REBUILT: dict[str, Callable[[tuple[str, str, str]], Message]] = {
    "verbatim": lambda call: assistant("Let me see.", call),
    "nulls": lambda call: assistant("Let me see.", call, refusal=None, audio=None, reasoning=None),
    "parts": lambda call: assistant([{"type": "text", "text": "Let me see."}], call),
    "named": lambda call: assistant("Let me see.", call, name="calculator"),
    "stripped": lambda call: assistant("\n\nLet me see.\n", call),
    "reasoning repeated": lambda call: assistant("Let me see.", call, reasoning_content="Hm."),
    "reasoning within": lambda call: assistant("<think>Hm.</think>\n\nLet me see.", call),
    "marked": lambda call: assistant(
        [{"type": "text", "text": "Let me see.", "cache_control": {"type": "ephemeral"}}], call
    ),
    "arguments compact": lambda call: assistant("Let me see.", (*call[:2], '{"b":2,"a":1}')),
    "arguments parsed": lambda call: assistant("Let me see.", (*call[:2], {"a": 1, "b": 2})),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", [ADD, COUNTER], ids=["unique", "counter"])
@pytest.mark.parametrize("form", REBUILT)
def test_reply_has_the_same_fingerprint_however_a_later_call_repeats_it(
    form: str, call: tuple[str, str, str]
) -> None:
    provides = provided_fingerprints("chat", chat(user("2 + 1?")), summary("Let me see.", call))
    again = chat(user("2 + 1?"), REBUILT[form](call), result(call[0], "3"))
    assert prefixes(needed_fingerprints("chat", again)) == prefixes(provides)


def test_fingerprints_are_the_same_from_a_conversation_that_was_read_already() -> None:
    turns, asked = FORMATS["chat"].turns, chat(user("q"))
    read, said = turns.read(asked), summary("Let me see.", ADD)
    provides = [call_memory.provided_fingerprints(turns, asked, said, read) for _ in range(2)]
    assert provides == [provided_fingerprints("chat", asked, said)] * 2


@pytest.mark.parametrize("content", [None, "", []])
def test_tool_call_has_the_same_fingerprint_with_null_empty_or_missing_text(content: Any) -> None:
    provides = provided_fingerprints("chat", chat(user("q")), summary("", ADD))
    again = chat(user("q"), assistant(content, ADD), result(ID, "3"))
    missing = chat(
        user("q"), {"role": "assistant", "tool_calls": again["messages"][1]["tool_calls"]}
    )
    assert prefixes(needed_fingerprints("chat", again)) == prefixes(provides)
    assert prefixes(needed_fingerprints("chat", missing)) == prefixes(provides)


def test_system_prompt_is_no_part_of_a_conversations_fingerprint() -> None:
    provides = provided_fingerprints(
        "chat", chat({"role": "system", "content": "It is noon."}, user("q")), summary("a")
    )
    later = chat(
        {"role": "developer", "content": "It is one."}, user("q"), assistant("a"), user("r")
    )
    assert prefixes(needed_fingerprints("chat", later)) == prefixes(provides)


def test_response_repeated_as_bare_items_has_the_replys_fingerprints() -> None:
    said = summary("Let me see.", ADD, response_id="resp_1")
    provides = provided_fingerprints("responses", {"input": "q"}, said)
    assert kinds(provides) == [TOOL_CALL, RESPONSE, UNIQUE_PREFIX]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"role": "assistant", "content": "Let me see."},
        {"type": "function_call", "name": "add", "arguments": '{"a":1,"b":2.0}', "call_id": ID},
        {"type": "function_call_output", "call_id": ID, "output": "3"},
    ]
    assert needed_fingerprints("responses", {"input": items}) == (provides[0], provides[2])


@pytest.mark.parametrize("api", ["messages", "chat"])
def test_reply_repeated_as_anthropics_blocks_has_the_replys_fingerprints(api: str) -> None:
    """Some clients send them in a chat, too."""
    marked = [{"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}]
    provides = provided_fingerprints(api, chat(user(marked)), summary("Let me see.", ADD))
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": ID, "name": "add", "input": {"b": 2.0, "a": 1}},
    ]
    results = [{"type": "tool_result", "tool_use_id": ID, "content": "3"}]
    again = chat(user("q"), {"role": "assistant", "content": blocks}, user(results))
    assert set(needed_fingerprints(api, again)) == set(provides)


def test_tool_message_in_a_responses_request_is_a_tool_result() -> None:
    told = {"role": "tool", "tool_call_id": ID, "content": "3"}
    calls = {"type": "function_call", "call_id": ID, "name": "add", "arguments": "{}"}
    assert TOOL_CALL in kinds(needed_fingerprints("responses", {"input": [user("q"), calls, told]}))


def test_responses_request_needs_the_fingerprint_of_its_previous_response_id() -> None:
    provides = provided_fingerprints(
        "responses", {"input": "q"}, summary("a", response_id="resp_1")
    )
    fields = {"input": [user("r")], "previous_response_id": "resp_1"}
    assert needed_fingerprints("responses", fields) == (provides[0],)
    assert kinds(provides) == [RESPONSE, PREFIX]
    # What it shows is not all that was said: it is no prefix of anything.
    later = provided_fingerprints("responses", fields, summary("b", response_id="resp_2"))
    assert kinds(later) == [RESPONSE]


def test_only_responses_provide_their_id() -> None:
    said = summary("a", response_id="x")
    assert kinds(provided_fingerprints("chat", chat(user("q")), said)) == [PREFIX]


def test_needed_fingerprints_name_the_newest_replies_first() -> None:
    needs: list[bytes] = []
    messages: list[Message] = []
    for turn in range(7):
        messages.append(user(f"q{turn}"))
        needs += provided_fingerprints("chat", chat(*messages), summary(f"a{turn}"))
        messages.append(assistant(f"a{turn}"))
    assert list(needed_fingerprints("chat", chat(*messages, user("now")))) == needs[:-5:-1]
    # The last reply is to be continued: those that were answered come first.
    assert list(needed_fingerprints("chat", chat(*messages))) == [*needs[-2:-6:-1], needs[-1]]


def test_continued_reply_counts_as_a_single_reply() -> None:
    begun = chat(user("q"), assistant("Once upon"))
    provides = provided_fingerprints("chat", begun, summary("a time."))
    whole = chat(user("q"), assistant("Once upon"), assistant("a time."), user("More!"))
    assert prefixes(needed_fingerprints("chat", whole)) == prefixes(provides)


def test_empty_reply_provides_no_fingerprint() -> None:
    assert provided_fingerprints("chat", chat(user("q")), summary()) == ()
    assert needed_fingerprints("chat", chat(user("q"), assistant(""), user("r"))) == ()


@pytest.mark.parametrize(
    ("tool_id", "unique"),
    [
        (ID, True),
        (OTHER_ID, True),
        ("call_8z3hq1xd", True),
        ("D681PevKs", True),
        ("call_0_550e8400-e29b-41d4-a716-44665544000a", True),
        # One of 2,000 ids of 16 hexadecimal digits has no letter.
        ("chatcmpl-tool-8213907465530912", True),
        ("function-call-17646483930218213", True),
        ("call_1", False),
        ("functions.get_weather:0", False),
        ("call_get_weather", False),
        ("call_00000000000000000001", False),
        ("", False),
    ],
)
def test_tool_call_ids_that_are_counters_are_no_fingerprint(tool_id: str, unique: bool) -> None:
    assert is_unique_id(tool_id) is unique
    call = (tool_id, "add", "{}")
    provides = provided_fingerprints("chat", chat(user("q")), summary("", call))
    needs = needed_fingerprints(
        "chat", chat(user("q"), assistant(None, call), result(tool_id, "1"))
    )
    assert (TOOL_CALL in kinds(provides)) is unique
    assert set(needs) == set(provides)


@pytest.mark.parametrize(
    "tool_id", [ID, "call_8z3hq1xd", "call_0_550e8400-e29b-41d4-a716-44665544000a"]
)
def test_tool_call_is_found_by_the_letters_and_digits_of_its_id(tool_id: str) -> None:
    """OpenClaw strips everything else."""
    stripped = re.sub("[^A-Za-z0-9]", "", tool_id)
    asked = chat(user("q"))
    done = [assistant(None, (stripped, "add", "{}")), result(stripped, "1")]
    provides = provided_fingerprints("chat", asked, summary("", (tool_id, "add", "{}")))
    assert needed_fingerprints("chat", chat(user("q"), *done)) == provides
    other = tool_id.replace("a", "b").replace("8", "9")
    provided_to_other = provided_fingerprints("chat", asked, summary("", (other, "add", "{}")))
    assert set(provides).isdisjoint(provided_to_other)


def test_conversations_with_different_images_have_different_fingerprints() -> None:
    one, other = (
        chat(user([{"type": "image_url", "image_url": {"url": url}}]), assistant("a"), user("r"))
        for url in "xy"
    )
    assert set(needed_fingerprints("chat", one)).isdisjoint(needed_fingerprints("chat", other))


def test_conversation_prefix_is_unique_from_its_first_unique_tool_call_id_on() -> None:
    talk = [user("q"), assistant("a"), user("r")]
    tools = [assistant("", ADD), result(ID, "3"), assistant("It is 3."), user("s")]
    counted = [assistant("", COUNTER), result("call_1", "3"), assistant("It is 3."), user("s")]
    for messages, expected in (
        ([*talk, *tools], [UNIQUE_PREFIX, UNIQUE_PREFIX, PREFIX]),
        ([*talk, *counted], [PREFIX] * 3),
        ([user("q"), *tools[1:]], [UNIQUE_PREFIX]),
    ):
        assert kinds(needed_fingerprints("chat", chat(*messages))) == expected


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
def test_rebuilt_conversation_has_the_same_fingerprints(steps: list[tuple[str, Any]]) -> None:
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
def test_different_conversations_have_different_fingerprints(
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
                unique = is_unique_id(what[0])
                found[-1][2].append(
                    what[0] if unique else (what[0], json.dumps(what[1], sort_keys=True))
                )
        elif kind == "result":
            found.append(("result", what[0], None if is_unique_id(what[0]) else what[1]))
        else:
            found.append(("user", what))
    return [
        ("said", "".join(entry[1]), entry[2]) if entry[0] == "said" else entry for entry in found
    ]


@given(st.lists(STEPS, max_size=8), SPOKEN)
def test_next_call_needs_the_prefix_that_a_call_provides(
    steps: list[tuple[str, Any]], reply: str
) -> None:
    messages = as_sent([*steps, ("user", "q")], str, json.dumps)
    provides = provided_fingerprints("chat", chat(*messages), summary(reply))
    needs = needed_fingerprints("chat", chat(*messages, assistant(reply), user("next")))
    assert prefixes(needs)[0] == provides[-1]


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
def test_tool_arguments_are_compared_as_parsed_json(one: Any, other: Any) -> None:
    assert canonical_arguments(one) == canonical_arguments(other)
