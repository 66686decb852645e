"""Whose an event of a tool is: of the call that asked for it, or whose whole text was executed."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from store.read.assembly import quoted_calls
from store.read.facts import matched_events
from store.records import ToolCall, ToolEvent
from tests.support.records import tool_event
from tests.support.stored import transition

NOW = datetime(2026, 1, 1, tzinfo=UTC)
A, B, C = (UUID(int=number) for number in (1, 2, 3))


@dataclass
class Event:
    """As `tool_events` has it."""

    tool_id: str | None = "made_up"
    quotes: list[UUID] | None = None
    second: float = 10
    asked_by: UUID | None = None
    name: str | None = "sql"

    def __post_init__(self) -> None:
        self.id = uuid4()
        self.at = NOW + timedelta(seconds=self.second)


def uuid7(second: float, number: int) -> UUID:
    milliseconds = int((NOW + timedelta(seconds=second)).timestamp() * 1000)
    return UUID(int=milliseconds << 80 | 0x7 << 76 | 0x2 << 62 | number)


@dataclass
class Call:
    """As `transitions` has it."""

    text_digest: UUID | None
    second: float = 0
    number: int = 0

    def __post_init__(self) -> None:
        self.id = uuid7(self.second, self.number)


def owners(events: list[Event], calls: list[Call], requested: Any = ()) -> list[UUID | None]:
    found = quoted_calls(events, calls, set(requested))
    return [found[event.id].call_id if event.id in found else None for event in events]


def test_sole_earlier_reply_with_the_quoted_text_owns_the_tool_event() -> None:
    writer, other = Call(A), Call(B)
    assert owners([Event(quotes=[A])], [writer, other]) == [writer.id]


def test_tool_event_quoting_two_equal_replies_has_no_owner() -> None:
    assert owners([Event(quotes=[A])], [Call(A), Call(A, number=1)]) == [None]


def test_tool_event_quoting_the_texts_of_two_replies_has_no_owner() -> None:
    assert owners([Event(quotes=[A, B])], [Call(A), Call(B)]) == [None]
    only = Call(A)
    assert owners([Event(quotes=[A, B])], [only]) == [only.id]


def test_reply_that_is_not_earlier_owns_no_tool_event() -> None:
    first = Call(A)
    assert owners([Event(quotes=[A], second=10)], [Call(A, second=10)]) == [None]
    assert owners([Event(quotes=[A], second=10)], [first, Call(A, second=11)]) == [first.id]


def test_tool_event_of_a_requested_tool_call_has_no_quoted_owner() -> None:
    assert owners([Event(quotes=[A])], [Call(A)], requested=["made_up"]) == [None]
    assert owners([Event(quotes=[A], asked_by=uuid4())], [Call(A)]) == [None]
    assert owners([Event(tool_id=None, quotes=[A])], [Call(A)]) == [None]


def test_reply_without_text_owns_no_tool_event() -> None:
    assert owners([Event(quotes=None), Event(quotes=[A])], [Call(None)]) == [None, None]


def test_header_tool_event_has_the_owner_of_the_tool_calls_result() -> None:
    writer = Call(A)
    events = [Event(quotes=[A]), Event(name=None)]
    assert owners(events, [writer]) == [writer.id, writer.id]
    found = quoted_calls(events, [writer], set())
    assert {one.name for one in found.values()} == {"sql"}


def test_reused_tool_id_has_an_owner_for_each_execution() -> None:
    writer, rewriter = Call(A), Call(B, second=5)
    events = [Event(quotes=[A], second=4), Event(quotes=[B], second=9), Event(second=9)]
    # What the header says is about one of them, and nothing tells which.
    assert owners(events, [writer, rewriter]) == [writer.id, rewriter.id, None]


EVENTS = st.builds(
    Event,
    tool_id=st.sampled_from(["x", "y", None]),
    quotes=st.none() | st.lists(st.sampled_from([A, B, C]), max_size=2),
    second=st.integers(0, 4),
)
CALLS = st.builds(Call, st.sampled_from([A, B, C, None]), second=st.integers(0, 4))


@given(st.lists(EVENTS, max_size=5), st.lists(CALLS, max_size=4), st.randoms())
def test_owner_of_a_tool_event_is_an_earlier_quoted_reply_in_any_order(
    events: list[Event], calls: list[Call], rng: Any
) -> None:
    for number, call in enumerate(calls):
        call.id = uuid7(call.second, number)
    found = quoted_calls(events, calls, {"y"})
    said = {call.id: call for call in calls}
    for event in events:
        if event.id not in found:
            continue
        owner = said[found[event.id].call_id]
        assert event.tool_id == "x"
        assert any(owner.text_digest in (one.quotes or ()) for one in events if one.tool_id == "x")
        if event.quotes:
            assert owner.second < event.second
            assert owner.text_digest in event.quotes
    shuffled = (rng.sample(events, len(events)), rng.sample(calls, len(calls)))
    assert quoted_calls(*shuffled, {"y"}) == found


CALC = ToolCall(id="t1", name="calc", arguments="{}")
SEARCH = ToolCall(id="t2", name="search", arguments='{"q": 1}')


def asked(event: ToolEvent, *calls: ToolCall) -> list[str | None]:
    made = transition(tool_calls=calls, tool_events=(event,))
    return [found.arguments for found in matched_events(made)]


def test_tool_event_that_no_call_asked_for_does_not_count() -> None:
    assert asked(tool_event("ok", "t1"), CALC, SEARCH) == ["{}"]
    assert asked(tool_event("ok", "t9"), CALC, SEARCH) == []
    assert asked(tool_event("ok", "t1")) == []


def test_malformed_tool_event_of_an_unreadable_tool_call_counts() -> None:
    unread = msgspec.structs.replace(tool_event("malformed", None), name="calc")
    assert asked(unread) == [None]
    assert asked(unread, SEARCH) == [None]
    assert asked(msgspec.structs.replace(unread, status="error")) == []
    assert asked(tool_event("malformed", "t9")) == []


def test_tool_event_without_an_id_counts_only_if_its_tool_call_is_unambiguous() -> None:
    nameless = msgspec.structs.replace(tool_event("ok", None), name=None)
    named = msgspec.structs.replace(nameless, name="search")
    assert asked(nameless, CALC) == ["{}"]
    assert asked(nameless, CALC, SEARCH) == []
    assert asked(named, CALC, SEARCH) == ['{"q": 1}']
    assert asked(named, CALC) == []
