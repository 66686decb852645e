"""Which of a call's tools an event is about: only what the call asked for counts."""

import msgspec

from store.read.facts import matched_events
from store.records import ToolCall, ToolEvent
from tests.support.records import tool_event
from tests.support.stored import transition

CALC = ToolCall(id="t1", name="calc", arguments="{}")
SEARCH = ToolCall(id="t2", name="search", arguments='{"q": 1}')


def asked(event: ToolEvent, *calls: ToolCall) -> list[str | None]:
    made = transition(tool_calls=calls, tool_events=(event,))
    return [found.arguments for found in matched_events(made)]


def test_an_event_that_no_call_asked_for_does_not_count() -> None:
    assert asked(tool_event("ok", "t1"), CALC, SEARCH) == ["{}"]
    assert asked(tool_event("ok", "t9"), CALC, SEARCH) == []
    assert asked(tool_event("ok", "t1")) == []


def test_a_reply_that_was_no_readable_call_is_malformed_itself() -> None:
    unread = msgspec.structs.replace(tool_event("malformed", None), name="calc")
    assert asked(unread) == [None]
    assert asked(unread, SEARCH) == [None]
    assert asked(msgspec.structs.replace(unread, status="error")) == []
    assert asked(tool_event("malformed", "t9")) == []


def test_an_event_without_an_id_counts_where_only_one_tool_can_be_meant() -> None:
    nameless = msgspec.structs.replace(tool_event("ok", None), name=None)
    named = msgspec.structs.replace(nameless, name="search")
    assert asked(nameless, CALC) == ["{}"]
    assert asked(nameless, CALC, SEARCH) == []
    assert asked(named, CALC, SEARCH) == ['{"q": 1}']
    assert asked(named, CALC) == []
