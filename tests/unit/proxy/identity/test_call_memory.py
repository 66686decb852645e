"""The memory that joins calls without a name, and what it makes of real clients' traffic."""

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stitching import (
    ALIKE_CALLS,
    CLIENTS,
    KINDS,
    Exchange,
    join_in_ledger,
    make_plans,
    recorded_runs,
    replay,
    score,
)
from proxy.identity.call_memory import (
    MOST_ATTEMPTS,
    PREFIX,
    RESPONSE,
    TOOL_CALL,
    UNIQUE_PREFIX,
    Ambiguous,
    Attempt,
    CallMemory,
    JoinedEpisode,
    RecentlyUsed,
)


def fingerprint(kind: int, number: int) -> bytes:
    return bytes((kind,)) + number.to_bytes(15)


A, B = fingerprint(TOOL_CALL, 1), fingerprint(TOOL_CALL, 2)
REPLY = fingerprint(RESPONSE, 1)
LONG, SHORT = fingerprint(UNIQUE_PREFIX, 1), fingerprint(UNIQUE_PREFIX, 2)
WORDS, FEWER_WORDS = fingerprint(PREFIX, 1), fingerprint(PREFIX, 2)


@pytest.mark.parametrize(
    ("provided", "needs", "found"),
    [
        ([], [A], None),
        ([(A, "e1")], [A], JoinedEpisode("e1", "tool_call", "certain", "e1")),
        ([(REPLY, "e1")], [REPLY], JoinedEpisode("e1", "response", "certain", "e1")),
        ([(LONG, "e1")], [LONG], JoinedEpisode("e1", "prefix", "likely", "e1")),
        ([(A, "e1"), (A, "e2"), (A, "e1")], [A], Ambiguous()),
        ([(LONG, "e1"), (LONG, "e1")], [LONG], JoinedEpisode("e1", "prefix", "likely", "e1")),
        ([(A, "e1"), (B, "e2")], [A, B], Ambiguous()),
        ([(A, "e1"), (LONG, "e2")], [A, LONG], JoinedEpisode("e1", "tool_call", "certain", "e1")),
        (
            [(A, "e1"), (A, "e2"), (LONG, "e1")],
            [A, LONG],
            JoinedEpisode("e1", "prefix", "likely", "e1"),
        ),
        ([(SHORT, "e1")], [LONG, SHORT], None),
    ],
    ids=[
        "nobody provided it",
        "a tool call",
        "a response",
        "a prefix with an id",
        "two episodes provided it",
        "branches of one episode",
        "tool results of two episodes",
        "the surer kind decides",
        "one of several episodes leaves it to the next",
        "a shorter prefix is left to the ledger",
    ],
)
def test_call_joins_the_only_episode_that_provided_its_needed_fingerprints(
    provided: list[tuple[bytes, str]], needs: list[bytes], found: JoinedEpisode | Ambiguous | None
) -> None:
    memory = CallMemory()
    for digest, episode in provided:
        memory.provide([digest], episode)
    assert memory.find_episode(needs) == found


def test_fingerprint_of_repeated_words_hints_at_an_episode_and_never_joins_it() -> None:
    memory = CallMemory()
    memory.provide([WORDS], "e1")
    assert memory.find_episode([WORDS]) is None
    assert memory.likely_episode([WORDS]) == "e1"
    assert memory.likely_episode([A]) is None
    assert memory.likely_episode([FEWER_WORDS, WORDS]) is None
    memory.provide([FEWER_WORDS], "e2", follows="e1")
    assert memory.likely_episode([FEWER_WORDS]) == "e1"
    memory.provide([WORDS], "e3")
    assert memory.likely_episode([WORDS]) is None
    assert memory.find_episode([WORDS]) is None


def test_remembered_failed_attempts_of_a_request_body_are_bounded() -> None:
    """However often it fails: a call's cost must not grow with the failures before it."""
    memory = CallMemory()
    for number in range(10 * MOST_ATTEMPTS):
        memory.remember_failed(b"body", f"e{number}", UUID(int=number))
    found = [memory.take_attempt(b"body") for _ in range(MOST_ATTEMPTS + 1)]
    latest = range(10 * MOST_ATTEMPTS - 1, 9 * MOST_ATTEMPTS - 1, -1)
    assert found == [*(Attempt(f"e{n}", UUID(int=n)) for n in latest), None]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["e1", "e2"])), max_size=200),
    st.integers(0, 40),
)
def test_bounded_memory_finds_only_episodes_that_provided_the_fingerprint(
    calls: list[tuple[int, str]], needed: int
) -> None:
    """What was forgotten is not found, or found of one of two: the ledger looks again."""
    memory = CallMemory(capacity=8)
    provided: dict[int, set[str]] = {}
    for number, episode in calls:
        memory.provide([fingerprint(UNIQUE_PREFIX, number)], episode)
        provided.setdefault(number, set()).add(episode)
    found = memory.find_episode([fingerprint(UNIQUE_PREFIX, needed)])
    if isinstance(found, JoinedEpisode):
        assert found.episode in provided[needed]
    elif isinstance(found, Ambiguous):
        assert len(provided[needed]) == 2


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 8))
def test_most_recently_used_entries_of_the_call_memory_are_kept(keys: list[int], size: int) -> None:
    memory: RecentlyUsed[int, int] = RecentlyUsed(size)
    for key in keys:
        if memory.get(key) is None:
            memory.put(key, key)
        assert len(memory) <= 2 * size
    latest = list(dict.fromkeys(reversed(keys)))[:size]
    assert [memory.get(key) for key in reversed(latest)] == list(reversed(latest))


@pytest.mark.parametrize("proxies", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_calls_of_real_clients_are_joined_to_their_own_episodes(proxies: int, seed: int) -> None:
    plans = make_plans(150, seed)
    seen = replay(recorded_runs(plans, seed), proxies, seed)
    result = score(seen, join_in_ledger(seen))
    assert result.false == 0
    # Some continue a beginning that is others', too.
    alike = ALIKE_CALLS * sum(kind == "alike" for _, kind in plans)
    assert result.right >= result.joins - alike


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("client", CLIENTS)
def test_lone_run_becomes_a_single_episode(client: str, kind: str) -> None:
    seen = replay(recorded_runs([(client, kind)], 0), 1, 0)
    result = score(seen, join_in_ledger(seen))
    assert (result.right, result.false, result.quarantined) == (len(seen) - 1, 0, 0)


FEW = st.sampled_from("ab")
STEPS = st.tuples(FEW, FEW, st.sampled_from(["", "call_1", "call_2"]))


def a_run(steps: list[tuple[str, str, str]]) -> list[Exchange]:
    """A chat of few words, whose server counts its tool calls."""
    messages: list[dict[str, Any]] = []
    exchanges = []
    tool_id = ""
    for asked, told, next_id in steps:
        if tool_id:
            messages.append({"role": "tool", "tool_call_id": tool_id, "content": asked})
        else:
            messages.append({"role": "user", "content": asked})
        call = {"id": next_id, "function": {"name": "f", "arguments": "{}"}}
        calls = [call] if next_id else []
        reply: dict[str, Any] = {"role": "assistant", "content": told, "tool_calls": calls}
        answer = {"id": "x", "choices": [{"message": reply}]}
        body = {"messages": list(messages)}
        exchanges.append(Exchange("chat", {}, body, 200, answer))
        messages.append(reply)
        tool_id = next_id
    return exchanges


@given(
    st.lists(st.lists(STEPS, min_size=1, max_size=4), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_runs_that_say_the_same_are_never_joined_to_each_other(
    runs: list[list[tuple[str, str, str]]], proxies: int, seed: int
) -> None:
    seen = replay([a_run(steps) for steps in runs], proxies, seed)
    result = score(seen, join_in_ledger(seen))
    assert result.false == 0
    firsts = [steps[0] for steps in runs]
    if len(set(firsts)) == len(firsts):
        assert result.right == result.joins
