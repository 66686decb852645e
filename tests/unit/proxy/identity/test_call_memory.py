"""The memory that joins calls without a name: what was provided, and what failed."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.identity.call_memory import (
    MOST_ATTEMPTS,
    PREFIX,
    RESPONSE,
    TOOL_CALL,
    UNIQUE_PREFIX,
    Attempt,
    CallMemory,
    Doubt,
    Generations,
    Joined,
)

FIRST, SECOND = UUID(int=1), UUID(int=2)


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
        ([(A, "e1")], [A], Joined("e1", "tool_call", "certain", "e1")),
        ([(REPLY, "e1")], [REPLY], Joined("e1", "response", "certain", "e1")),
        ([(LONG, "e1")], [LONG], Joined("e1", "prefix", "likely", "e1")),
        ([(A, "e1"), (A, "e2"), (A, "e1")], [A], Doubt()),
        ([(LONG, "e1"), (LONG, "e1")], [LONG], Joined("e1", "prefix", "likely", "e1")),
        ([(A, "e1"), (B, "e2")], [A, B], Doubt()),
        ([(A, "e1"), (LONG, "e2")], [A, LONG], Joined("e1", "tool_call", "certain", "e1")),
        ([(A, "e1"), (A, "e2"), (LONG, "e1")], [A, LONG], Joined("e1", "prefix", "likely", "e1")),
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
def test_call_joins_the_one_episode_that_provided_what_it_needs(
    provided: list[tuple[bytes, str]], needs: list[bytes], found: Joined | Doubt | None
) -> None:
    memory = CallMemory()
    for digest, episode in provided:
        memory.provide([digest], episode)
    assert memory.find(needs) == found


def test_words_join_nothing_and_hint_at_the_episode_they_continue() -> None:
    memory = CallMemory()
    memory.provide([WORDS], "e1")
    assert memory.find([WORDS]) is None
    assert memory.followed([WORDS]) == "e1"
    assert memory.followed([A]) is None
    assert memory.followed([FEWER_WORDS, WORDS]) is None
    memory.provide([FEWER_WORDS], "e2", follows="e1")
    assert memory.followed([FEWER_WORDS]) == "e1"
    memory.provide([WORDS], "e3")
    assert memory.followed([WORDS]) is None
    assert memory.find([WORDS]) is None


def test_continued_episode_is_handed_on() -> None:
    memory = CallMemory()
    memory.provide([A], "e2", follows="e1")
    assert memory.find([A]) == Joined("e2", "tool_call", "certain", "e1")


def test_named_episode_repeats_its_own_attempts_only() -> None:
    memory = CallMemory()
    memory.failed(b"body", "e1", FIRST)
    memory.failed(b"body", "e2", SECOND)
    assert memory.retried(b"body", "e3") is memory.retried(b"other") is None
    assert memory.retried(b"body", "e1") == Attempt("e1", FIRST)
    assert memory.retried(b"body", "e1") is None


def test_failed_attempts_of_one_body_are_bounded() -> None:
    """However often it fails: a call's cost must not grow with the failures before it."""
    memory = CallMemory()
    for number in range(10 * MOST_ATTEMPTS):
        memory.failed(b"body", f"e{number}", UUID(int=number))
    found = [memory.retried(b"body") for _ in range(MOST_ATTEMPTS + 1)]
    latest = range(10 * MOST_ATTEMPTS - 1, 9 * MOST_ATTEMPTS - 1, -1)
    assert found == [*(Attempt(f"e{n}", UUID(int=n)) for n in latest), None]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["e1", "e2"])), max_size=200),
    st.integers(0, 40),
)
def test_bounded_memory_names_only_episodes_that_provided_it(
    calls: list[tuple[int, str]], needed: int
) -> None:
    """What was forgotten is not found, or found of one of two: the ledger looks again."""
    memory = CallMemory(capacity=8)
    provided: dict[int, set[str]] = {}
    for number, episode in calls:
        memory.provide([fingerprint(UNIQUE_PREFIX, number)], episode)
        provided.setdefault(number, set()).add(episode)
    found = memory.find([fingerprint(UNIQUE_PREFIX, needed)])
    if isinstance(found, Joined):
        assert found.episode in provided[needed]
    elif isinstance(found, Doubt):
        assert len(provided[needed]) == 2


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 8))
def test_entries_used_last_are_kept(keys: list[int], size: int) -> None:
    memory: Generations[int, int] = Generations(size)
    for key in keys:
        if memory.get(key) is None:
            memory.put(key, key)
        assert len(memory) <= 2 * size
    latest = list(dict.fromkeys(reversed(keys)))[:size]
    assert [memory.get(key) for key in reversed(latest)] == list(reversed(latest))
