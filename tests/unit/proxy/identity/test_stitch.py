"""Joining calls without a name: what is provided, what is needed, and when neither will do."""

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
LONG, SHORT = fingerprint(UNIQUE_PREFIX, 1), fingerprint(UNIQUE_PREFIX, 2)
WORDS, FEWER_WORDS = fingerprint(PREFIX, 1), fingerprint(PREFIX, 2)


@pytest.mark.parametrize(
    ("kind", "method", "confidence"),
    [
        (TOOL_CALL, "tool_call", "certain"),
        (RESPONSE, "response", "certain"),
        (UNIQUE_PREFIX, "prefix", "likely"),
    ],
)
def test_a_call_joins_who_provides_what_it_needs(kind: int, method: str, confidence: str) -> None:
    stitches = CallMemory()
    assert stitches.find([fingerprint(kind, 1)]) is None
    stitches.provide([fingerprint(kind, 1)], "e1")
    found = stitches.find([fingerprint(kind, 1)])
    assert isinstance(found, Joined)
    assert (found.episode, found.method, found.confidence) == ("e1", method, confidence)


def test_what_two_episodes_provided_is_in_doubt() -> None:
    stitches = CallMemory()
    stitches.provide([A], "e1")
    stitches.provide([A], "e2")
    stitches.provide([A], "e1")
    assert stitches.find([A]) == Doubt()


def test_branches_of_one_episode_are_that_episode() -> None:
    stitches = CallMemory()
    stitches.provide([LONG], "e1")
    stitches.provide([LONG], "e1")
    assert stitches.find([LONG]) == Joined("e1", "prefix", "likely", "e1")


def test_results_of_two_episodes_tools_are_in_doubt() -> None:
    stitches = CallMemory()
    stitches.provide([A], "e1")
    stitches.provide([B], "e2")
    assert stitches.find([A, B]) == Doubt()


def test_a_surer_fingerprint_decides_before_the_others() -> None:
    stitches = CallMemory()
    stitches.provide([A], "e1")
    stitches.provide([LONG], "e2")
    assert stitches.find([A, LONG]) == Joined("e1", "tool_call", "certain", "e1")


def test_a_fingerprint_of_several_episodes_leaves_it_to_the_next() -> None:
    stitches = CallMemory()
    for episode in ("e1", "e2"):
        stitches.provide([A], episode)
    stitches.provide([LONG], "e1")
    assert stitches.find([A, LONG]) == Joined("e1", "prefix", "likely", "e1")


def test_a_shorter_prefix_is_left_to_the_ledger() -> None:
    stitches = CallMemory()
    stitches.provide([SHORT], "e1")
    assert stitches.find([LONG, SHORT]) is None


def test_words_join_nothing_here_but_say_what_is_most_likely_followed() -> None:
    stitches = CallMemory()
    stitches.provide([WORDS], "e1")
    assert stitches.find([WORDS]) is None
    assert stitches.followed([WORDS]) == "e1"
    assert stitches.followed([A]) is None
    assert stitches.followed([FEWER_WORDS, WORDS]) is None
    stitches.provide([FEWER_WORDS], "e2", follows="e1")
    assert stitches.followed([FEWER_WORDS]) == "e1"
    stitches.provide([WORDS], "e3")
    assert stitches.followed([WORDS]) is None
    assert stitches.find([WORDS]) is None


def test_what_is_followed_is_handed_on() -> None:
    stitches = CallMemory()
    stitches.provide([A], "e2", follows="e1")
    assert stitches.find([A]) == Joined("e2", "tool_call", "certain", "e1")


def test_a_failed_attempt_is_repeated_once() -> None:
    stitches = CallMemory()
    stitches.failed(b"body", "e1", FIRST)
    stitches.failed(b"body", "e2", SECOND)
    found = {stitches.retried(b"body"), stitches.retried(b"body")}
    assert found == {Attempt("e1", FIRST), Attempt("e2", SECOND)}
    assert stitches.retried(b"body") is None
    assert stitches.retried(b"other") is None


def test_a_named_episode_repeats_its_own_attempts_only() -> None:
    stitches = CallMemory()
    stitches.failed(b"body", "e1", FIRST)
    stitches.failed(b"body", "e2", SECOND)
    assert stitches.retried(b"body", "e3") is None
    assert stitches.retried(b"body", "e1") == Attempt("e1", FIRST)
    assert stitches.retried(b"body", "e1") is None


def test_of_one_body_only_so_many_attempts_are_remembered() -> None:
    """However often it fails: a call's cost must not grow with the failures before it."""
    stitches = CallMemory()
    for number in range(10 * MOST_ATTEMPTS):
        stitches.failed(b"body", f"e{number}", UUID(int=number))
    found = [stitches.retried(b"body") for _ in range(MOST_ATTEMPTS + 1)]
    latest = range(10 * MOST_ATTEMPTS - 1, 9 * MOST_ATTEMPTS - 1, -1)
    assert found == [*(Attempt(f"e{n}", UUID(int=n)) for n in latest), None]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["e1", "e2"])), max_size=200),
    st.integers(0, 40),
)
def test_a_bounded_memory_names_only_who_provided_it(
    calls: list[tuple[int, str]], needed: int
) -> None:
    """What was forgotten is not found, or found of one of two: the ledger looks again."""
    stitches = CallMemory(capacity=8)
    provided: dict[int, set[str]] = {}
    for number, episode in calls:
        stitches.provide([fingerprint(UNIQUE_PREFIX, number)], episode)
        provided.setdefault(number, set()).add(episode)
    found = stitches.find([fingerprint(UNIQUE_PREFIX, needed)])
    if isinstance(found, Joined):
        assert found.episode in provided[needed]
    elif isinstance(found, Doubt):
        assert len(provided[needed]) == 2


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 8))
def test_the_entries_touched_last_are_kept(keys: list[int], size: int) -> None:
    memory: Generations[int, int] = Generations(size)
    for key in keys:
        memory.put(key, key)
        assert len(memory) <= 2 * size
    latest = list(dict.fromkeys(reversed(keys)))[:size]
    assert [memory.get(key) for key in reversed(latest)] == list(reversed(latest))


def test_what_is_needed_for_stays() -> None:
    memory: Generations[int, int] = Generations(2)
    memory.put(0, 0)
    for key in range(1, 20):
        memory.put(key, key)
        assert memory.get(0) == 0
    memory.forget(0)
    assert memory.get(0) is None
