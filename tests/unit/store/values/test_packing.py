"""Additions: exact, whatever the texts; small, where a thread repeats itself."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.ids import lowest_id_at
from store.read.assembly import full_texts
from store.records import CallRecord
from store.values.packing import delta, rebuild, shared_prefix
from store.write.bases import MOST_TIPS, BaseCache
from store.write.rows import TRANSITION_COLUMNS, transition_row
from tests.support.records import call, tokens

# Few letters, so that texts share beginnings and ends.
Text = st.lists(st.sampled_from([b"a", b"b", b"\x00", b"\xff"]), max_size=40).map(b"".join)


class Stored:
    """A row by the names of its columns."""

    def __init__(self, record: CallRecord, row: tuple[object, ...]) -> None:
        self.__dict__.update(zip(TRANSITION_COLUMNS, row, strict=True))


@given(Text, Text)
def test_rebuild_reverses_delta(base: bytes, data: bytes) -> None:
    found = delta(base, data)
    assert rebuild(base, *found) == data
    assert found.prefix + found.suffix <= min(len(base), len(data))


@given(Text, Text, Text, Text)
def test_delta_finds_the_shared_head_and_tail(
    head: bytes, old: bytes, new: bytes, tail: bytes
) -> None:
    found = delta(head + old + tail, head + new + tail)
    assert len(found.middle) <= len(new)


@given(Text, Text)
def test_shared_prefix_of_two_texts_is_the_longest(one: bytes, other: bytes) -> None:
    length = shared_prefix(one, other)
    assert one[:length] == other[:length]
    assert one[length : length + 1] != other[length : length + 1] or length == len(one)


def thread(turns: int, episode: str = "e", agent: str = "a") -> list[CallRecord]:
    messages = [{"role": "system", "content": f"{agent} " * 40}]
    ids = list(range(100))
    calls = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn}"})
        body = {"messages": messages, "tools": ["t" * 200]}
        sampled = [1000 + turn] * 5
        calls.append(call(episode, request=json.dumps(body).encode(), tokens=tokens(ids, sampled)))
        messages.append({"role": "assistant", "content": f"answer {turn}"})
        ids = ids + sampled + [7, 8, turn]
    return calls


def stored(bases: BaseCache, calls: list[CallRecord]) -> list[Any]:
    return [Stored(c, transition_row(c, c.id, bases.store(c))) for c in calls]


def assert_whole(rows: list[Any], calls: list[CallRecord]) -> None:
    found = full_texts(rows)
    assert found.of == {c.id: (c.request, c.tokens.prompt_ids) for c in calls}
    assert found.damaged == {}


@given(st.lists(st.integers(min_value=1, max_value=5), min_size=1, max_size=5), st.randoms())
def test_calls_stored_in_any_batches_and_order_are_read_back(sizes: list[int], dice: Any) -> None:
    calls = thread(4, agent="writer") + thread(5, agent="checker") + [call("e", request=None)]
    dice.shuffle(calls)
    bases, rows, rest = BaseCache(capacity=dice.choice([0, 5000, 10**6])), [], list(calls)
    for size in [*sizes, len(calls)]:
        taken, rest = rest[:size], rest[size:]
        rows += stored(bases, taken)
    assert_whole(rows, calls)


def test_call_of_a_thread_stores_only_its_additions() -> None:
    calls = thread(6)
    rows = stored(BaseCache(), calls)
    assert [row.parent_id for row in rows] == [None, *[c.id for c in calls[:-1]]]
    assert all(len(row.request) < 100 for row in rows[1:])
    assert all(len(row.prompt_ids) == 3 * 4 for row in rows[1:])


@pytest.mark.parametrize("at_once", [True, False])
def test_unnamed_call_is_stored_as_additions_to_the_call_that_provided_its_needs(
    at_once: bool,
) -> None:
    """Each has an episode of its own until the store joins them."""
    said = [bytes([3]) + bytes([turn]) * 15 for turn in range(6)]
    calls = [
        msgspec.structs.replace(
            c, episode=str(turn), provides=(said[turn],), needs=said[:turn][::-1]
        )
        for turn, c in enumerate(thread(6))
    ]
    bases = BaseCache()
    rows = stored(bases, calls) if at_once else [row for c in calls for row in stored(bases, [c])]
    assert [row.parent_id for row in rows] == [None, *[c.id for c in calls[:-1]]]
    assert_whole(rows, calls)


def test_calls_of_agents_that_take_turns_are_stored_as_additions_to_their_own_calls() -> None:
    writer, checker = thread(3, agent="writer"), thread(3, agent="checker")
    turns = [c for pair in zip(writer, checker, strict=True) for c in pair]
    rows = {row.id: row for row in stored(BaseCache(), turns)}
    assert rows[writer[2].id].parent_id == writer[1].id
    assert rows[checker[2].id].parent_id == checker[1].id


def test_call_is_never_stored_as_additions_to_a_call_of_another_day() -> None:
    midnight = datetime(2026, 3, 1, tzinfo=UTC)
    ids = [lowest_id_at(midnight + timedelta(milliseconds=ms)) for ms in (-1, 1)]
    request = b"same" * 100
    rows = stored(BaseCache(), [call("e", id=i, request=request) for i in ids])
    assert [row.parent_id for row in rows] == [None, None]


def test_memory_of_calls_that_later_calls_add_to_is_bounded() -> None:
    bases = BaseCache(capacity=10_000)
    for number in range(50):
        stored(bases, [call(f"e{number}", request=b"x" * 1000)])
    assert bases.tips_of("e0") == []
    assert len(bases.tips_of("e49")) == 1
    stored(bases, [call("e49", request=bytes([65 + n]) * 200) for n in range(9)])
    assert len(bases.tips_of("e49")) <= MOST_TIPS


def damaged(rows: list[Any]) -> list[str]:
    return [why.partition(": ")[2] for why in full_texts(rows).damaged.values()]


def test_damage_spreads_only_to_calls_that_add_to_the_damaged_call() -> None:
    rows = stored(BaseCache(), [*thread(3), *thread(3, episode="other")])
    rows[1].request_prefix = 10**6
    first, second = damaged(rows)
    assert "cannot be taken from a base of" in first
    assert second == "that call cannot be read back"
    assert len(full_texts(rows).of) == 4


def test_calls_that_add_to_each_other_are_damaged() -> None:
    rows = stored(BaseCache(), thread(2))
    rows[0].parent_id = rows[1].id
    assert damaged(rows) == ["that call cannot be read back"] * 2
