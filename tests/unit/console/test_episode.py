"""What an episode comes to is said in words, on a time axis, and by what is recorded."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from console.episode import MOST_LANES, format_ranges, lanes_of, numbers_of, why_not_consumed
from store.read.assembly import ToolsByCall, full_request, rebuild_calls
from store.read.detail import EpisodeDetail
from store.values.packing import delta

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)


def head(number: int, **changes: Any) -> SimpleNamespace:
    facts: dict[str, Any] = {
        "id": UUID(int=number),
        "agent": "a",
        "lane": None,
        "status": "complete",
        "http_status": 200,
        "trainable": True,
        "reason": None,
        "started_at": NOW + timedelta(seconds=number),
        "total_ms": 1000.0,
        "sampled_tokens": 3,
    }
    return SimpleNamespace(**facts | changes)


def recorded(calls: list[Any], **changes: Any) -> EpisodeDetail:
    facts: dict[str, Any] = dict.fromkeys(EpisodeDetail.__struct_fields__)
    facts |= {"calls": calls, "statements": (), "tools": ToolsByCall({}, {}, {})}
    return EpisodeDetail(**facts | {"earlier_calls": 0, "split": "train", "task": "t"} | changes)


def test_agents_have_lanes_on_a_shared_time_axis() -> None:
    calls = [
        head(0),
        head(1, agent="b", trainable=False, reason="greedy"),
        head(2, status="client_gone"),
        head(3),
    ]
    tools = ToolsByCall({}, {}, {UUID(int=3): UUID(int=9)})
    lanes, seconds = lanes_of(recorded(calls, tools=tools, earlier_calls=10))
    assert {
        name: [(mark.x, mark.width, mark.colour, mark.title.split(",")[0]) for mark in marks]
        for name, marks in lanes.items()
    } == {
        "a": [
            (0.0, 25.0, "good", "call 11"),
            (50.0, 25.0, "bad", "call 13"),
            (75.0, 25.0, "again", "call 14"),
        ],
        "b": [(25.0, 25.0, "plain", "call 12")],
    }
    assert seconds == 4.0
    threads = [head(1), head(2, agent="subagent", lane="x"), head(3, agent="subagent", lane="y")]
    assert list(lanes_of(recorded(threads))[0]) == ["a", "subagent x", "subagent y"]
    many, _ = lanes_of(recorded([head(number, agent=f"agent {number}") for number in range(50)]))
    assert [len(many), list(many)[-1]] == [MOST_LANES + 1, "(others)"]


@pytest.mark.parametrize(
    ("fate", "episode", "why"),
    [
        ({"trained": True}, {}, ""),
        ({"update_id": UUID(int=1)}, {}, "an update has claimed it"),
        ({}, {"split": "eval"}, "evaluation"),
        ({}, {"quarantined_reason": "doubtful"}, "quarantined: doubtful"),
        ({"scored": False, "lacks": "missing_metric"}, {}, "a metric"),
        ({"scored": False, "lacks": "undeclared_text"}, {}, "no value for a text"),
        ({"scored": False}, {}, "nobody has scored it"),
        ({"rolled_back": True}, {}, "was rolled back"),
        ({"in_fault_time": True}, {}, "at fault"),
        ({}, {}, "waits for the next update"),
    ],
)
def test_episode_page_says_why_its_episode_is_not_trained(
    fate: dict[str, Any], episode: dict[str, Any], why: str
) -> None:
    facts = ("trained", "update_id", "lacks", "rolled_back", "in_fault_time")
    known: dict[str, Any] = dict.fromkeys(facts) | {"scored": True} | fate
    said: Any = why_not_consumed(SimpleNamespace(**known), recorded([], **episode))
    assert why in said
    assert bool(said) is bool(why)


def test_requests_stored_as_deltas_are_rebuilt_in_any_order_of_storage() -> None:
    bodies = {UUID(int=n): b"the same beginning " * n + b"%d" % n for n in (1, 2, 3, 4)}
    # The third was stored first: the others are additions to each other, and a fifth is lost.
    parents = {2: 3, 1: 2, 4: 1}
    rows = {}
    for n in (1, 2, 3, 4):
        own, parent = bodies[UUID(int=n)], parents.get(n)
        added = delta(bodies[UUID(int=parent)], own) if parent else None
        rows[UUID(int=n)] = SimpleNamespace(
            id=UUID(int=n),
            parent_id=parent and UUID(int=parent),
            request=added.middle if added else own,
            request_prefix=added and added.prefix,
            request_suffix=added and added.suffix,
        )
    rows[UUID(int=5)] = SimpleNamespace(
        id=UUID(int=5), parent_id=UUID(int=6), request=b"", request_prefix=1, request_suffix=0
    )
    wanted = [UUID(int=4), UUID(int=5), UUID(int=2)]
    made, lost = rebuild_calls(rows.values(), wanted, full_request)
    assert made == {one: bodies[one] for one in (wanted[0], wanted[2])}
    assert list(lost) == [wanted[1]]


def test_consecutive_call_numbers_are_shown_as_a_range() -> None:
    assert [format_ranges(numbers) for numbers in ((1, 2, 3, 7), (9,), ())] == [
        "1 to 3, 7",
        "9",
        "",
    ]


def test_call_and_its_repetition_have_the_same_number() -> None:
    tools = ToolsByCall({}, {}, {UUID(int=1): UUID(int=2)})
    episode = recorded([head(number) for number in range(4)], tools=tools, earlier_calls=10)
    assert [*numbers_of(episode).values()] == [11, 12, 12, 13]
