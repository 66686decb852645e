"""What a run of swaps came to, from what clients, publisher and ledger saw (pure)."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from benchmarks.swap.clients import FEWEST_TOKENS, MOST_TOKENS, NotWhole, Reply, tokens_of
from benchmarks.swap.figures import (
    Episodes,
    Found,
    Run,
    bars,
    episodes_of,
    figures,
    longest_gaps,
    tables,
)
from benchmarks.swap.records import Call, Event, Gap, Load, Seen, Stored, Unload, Waited
from benchmarks.swap.schedule import plan, spans

DAY = datetime(2026, 11, 23, tzinfo=UTC)
BEGAN = 100.0


def call(number: int, at: float, version: str, *, why: str | None = None) -> Call:
    return Call(
        episode=f"e{number}",
        began=at,
        ended=at + 1.0,
        id=f"c{number}",
        version=version,
        first=None if why else at + 0.25,
        why=why,
    )


def stored(number: int, version: int, *, at: float = 0.0, episode: str | None = None) -> Stored:
    when = DAY + timedelta(seconds=at)
    return Stored(id=f"c{number}", episode=episode or f"e{number}", version=version, at=when)


def test_turns_are_of_a_minute_and_alternate() -> None:
    schedule = plan(BEGAN, 10.0, 60)
    assert (schedule.turns, schedule.turn_s, schedule.ends) == (10, 60.0, 700.0)
    seen = [
        schedule.has_loads(at) for at in (99.0, 100.0, 159.0, 160.0, 219.0, 220.0, 699.0, 700.0)
    ]
    assert seen == [False, False, False, True, True, False, True, False]
    assert plan(BEGAN, 1.0, 4).turn_s == 30.0


def test_loads_come_evenly_in_turns_with_loads() -> None:
    schedule = plan(BEGAN, 10.0, 60)
    due = [schedule.due(at) for at in (159.0, 160.0, 164.9, 165.0, 219.9, 220.0, 280.0, 699.9)]
    assert due == [0, 1, 1, 2, 12, 0, 13, 60]
    # What was late in a turn stays due in the next one.
    assert plan(BEGAN, 4.0, 3).due(BEGAN + 239.0) == 3


def test_a_turn_without_loads_counts_from_when_the_last_was_unloaded() -> None:
    schedule = plan(BEGAN, 4.0, 4)
    seen = [(99.0, 1), (101.0, 1), (161.0, 2), (219.0, 3), (221.0, 3), (240.0, 2), (246.0, 1)]
    assert spans(schedule, seen) == (
        [(160.0, 220.0), (280.0, 340.0)],
        [(101.0, 160.0), (246.0, 280.0)],
    )
    assert spans(schedule, [(221.0, 2)])[1] == []


@pytest.mark.parametrize(
    ("later", "retired", "kind"),
    [
        (1, {}, "kept"),
        (2, {}, "changed"),
        (2, {1: DAY + timedelta(seconds=5.0)}, "left"),
        # It was retired only after the episode had gone on with another.
        (2, {1: DAY + timedelta(seconds=15.0)}, "changed"),
    ],
)
def test_an_episode_has_one_version_or_had_to_leave_it(
    later: int, retired: dict[int, datetime], kind: str
) -> None:
    calls = [call(0, 0.0, "p@1"), call(1, 10.0, f"p@{later}")]
    kept = [stored(0, 1, episode="e"), stored(1, later, at=10.0, episode="e")]
    found = episodes_of(calls, kept, retired, "p")
    expected = Episodes(
        episodes=1,
        changed=int(kind == "changed"),
        had_to_leave=int(kind == "left"),
        unstored=0,
        misnamed=0,
    )
    assert found == expected


def test_calls_are_compared_with_the_ledger_one_by_one() -> None:
    calls = [call(0, 0.0, "p@1"), call(1, 0.0, "p@2"), call(2, 0.0, "p@1", why="status 500")]
    found = episodes_of(calls, [stored(0, 3)], {}, "p")
    assert (found.unstored, found.misnamed) == (1, 1)


def run(*, gap_s: float, events: list[Event], calls: list[Call] | None = None) -> Found:
    """The figures of a run of two turns of a minute; gaps are of 10 ms without loads."""
    schedule = plan(BEGAN, 2.0, 2)
    gaps = [Gap(at=BEGAN + n / 2, seconds=0.01 if n < 120 else gap_s) for n in range(240)]
    return figures(
        Run(
            policy="p",
            layers=4,
            streams=1,
            minutes=2.0,
            slots=2,
            probe_s=0.1,
            schedule=schedule,
            calls=calls or [],
            gaps=gaps,
            events=events,
            stored=[],
            retired={},
        )
    )


def load(version: int, at: float) -> Load:
    return Load(version=f"p@{version}", step=at, recorded=at + 0.1, promoted=at + 0.5)


EVENTS: list[Event] = [
    load(1, 80.0),
    Seen(at=90.0, loaded=1),
    Seen(at=101.0, loaded=1),
    load(2, 160.0),
    Seen(at=161.0, loaded=2),
    Unload(version="p@1", at=185.0),
    Seen(at=185.0, loaded=1),
    Waited(at=190.0),
    load(3, 191.0),
    Seen(at=192.0, loaded=2),
    Unload(version="p@2", at=230.0),
    Seen(at=230.0, loaded=1),
]
CALLS = [call(1, 105.0, "p@1"), call(2, 161.0, "p@2"), call(3, 193.0, "p@3")]


def without_ledger(found: Found) -> Found:
    """The same, as if the ledger had all calls."""
    whole = msgspec.structs.replace(found.episodes, unstored=0)
    return msgspec.structs.replace(found, episodes=whole)


def test_a_run_without_a_trace_meets_its_bars() -> None:
    found = without_ledger(run(gap_s=0.02, events=EVENTS, calls=CALLS))
    assert found.ratio == pytest.approx(2.0)
    assert found.without.gaps == 118
    assert found.first_token is not None
    assert found.first_token.median_s == pytest.approx(1.75)
    assert found.first_token.max_s == pytest.approx(2.25)
    assert found.unloaded_after is not None
    assert found.unloaded_after.max_s == pytest.approx(79.0)
    assert (found.loads, found.unloads, found.waited) == (2, 2, 1)
    assert all(bar.holds for bar in bars(found)), [bar for bar in bars(found) if not bar.holds]
    told = "\n".join(table.markdown() for table in tables(found))
    assert "| optimiser step → first token at a client | 1.75 | 2.25 |" in told


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (run(gap_s=0.021, events=EVENTS), "p99 gap, times that without loads"),
        (run(gap_s=0.01, events=EVENTS[:-4]), "loads"),
        (run(gap_s=0.01, events=EVENTS[:-2]), "adapters loaded in the end"),
        (run(gap_s=0.01, events=[*EVENTS, Seen(at=231.0, loaded=3)]), "adapters loaded, at most"),
        (run(gap_s=0.01, events=EVENTS), "versions that no client saw"),
        (
            run(gap_s=0.01, events=EVENTS, calls=[call(1, 184.5, "p@1")]),
            "adapters unloaded under a call",
        ),
        (
            run(gap_s=0.01, events=EVENTS, calls=[call(1, 0.0, "", why="status 500")]),
            "calls failed",
        ),
    ],
)
def test_each_bar_can_be_missed(found: Found, missed: str) -> None:
    assert missed in [bar.name for bar in bars(found) if not bar.holds]


def test_a_call_that_failed_is_told_with_its_time() -> None:
    calls = [call(1, 110.0, "p@1", why="TimeoutError: "), call(2, 120.0, "", why="status 500")]
    assert run(gap_s=0.01, events=EVENTS, calls=calls).reasons == (
        "p@1, 10.0 to 11.0 s, no text: TimeoutError: ",
        "no version, 20.0 to 21.0 s, no text: status 500",
    )


def test_the_longest_gap_of_each_load_is_told() -> None:
    gaps = [
        Gap(at=159.0, seconds=9.0),
        # Begun before the load, and while it went on.
        Gap(at=160.1, seconds=0.3),
        Gap(at=160.4, seconds=0.2),
        # It began only after all was done.
        Gap(at=161.0, seconds=0.4),
        Gap(at=200.0, seconds=10.0),
        Gap(at=201.0, seconds=0.8),
    ]
    assert longest_gaps(gaps, [load(2, 160.0), load(3, 200.0)]) == [0.3, 10.0]


def test_a_load_that_was_rejected_is_none() -> None:
    refused = msgspec.structs.replace(load(2, 160.0), rejected="it did not load")
    found = run(gap_s=0.01, events=[load(1, 80.0), Seen(at=101.0, loaded=1), refused])
    assert (found.loads, found.rejected) == (0, ("it did not load",))


def test_gaps_that_were_never_measured_meet_no_bar() -> None:
    never_settled: list[Event] = [load(1, 80.0), Seen(at=101.0, loaded=2)]
    found = run(gap_s=0.01, events=never_settled)
    assert found.without.gaps == 0
    missed = [bar.name for bar in bars(found) if not bar.holds]
    assert "p99 gap, times that without loads" in missed


CHUNK = b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'


def test_a_reply_is_read_whatever_pieces_it_comes_in() -> None:
    reply = Reply()
    whole = CHUNK % b"a" + CHUNK % b"b" + USAGE + b"data: [DONE]\n\n"
    had = [reply.feed(whole[at : at + 1]) for at in range(len(whole))]
    assert (reply.text, sum(had)) == ("ab", 3)
    reply.check(2)


@pytest.mark.parametrize(
    "pieces",
    [
        CHUNK % b"a" + USAGE,
        CHUNK % b"a" + b"data: [DONE]\n\n",
        b'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\ndata: [DONE]\n\n',
    ],
)
def test_a_reply_that_is_not_whole_is_found(pieces: bytes) -> None:
    reply = Reply()
    reply.feed(pieces)
    with pytest.raises(NotWhole):
        reply.check(2)


def test_an_error_in_a_stream_is_found() -> None:
    with pytest.raises(NotWhole, match="engine died"):
        Reply().feed(b'data: {"error": {"message": "engine died"}}\n\n')


def test_clients_do_not_go_on_in_step() -> None:
    asked = [tokens_of(f"swap-{own}-0", 1) for own in range(32)]
    assert {min(asked), max(asked)} <= set(range(FEWEST_TOKENS, MOST_TOKENS + 1))
    assert len(set(asked)) > 8
    assert asked == [tokens_of(f"swap-{own}-0", 1) for own in range(32)]
