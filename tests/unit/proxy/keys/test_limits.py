"""The limits of a key, and how many tokens a call took, from the bytes of its reply."""

import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.keys import WINDOW_S, Usage, share_of, tokens_of
from store.keys import Grant


def usage(workers: int = 1, **limits: int) -> Usage:
    held = Usage()
    held.hold_to(Grant(id="a", hash=b"", scopes=(), **limits), workers)
    return held


@given(
    st.integers(1, 5),
    st.lists(st.floats(0, 30), min_size=1, max_size=60),
)
def test_no_minute_has_more_requests_than_the_limit_and_the_wait_suffices(
    limit: int, pauses: list[float]
) -> None:
    held, now = usage(per_minute=limit), 1000.0
    begun: list[float] = []
    for pause in pauses:
        now += pause
        wait_s = held.begin(now)
        if wait_s is None:
            begun.append(now)
            held.end()
            continue
        assert 1 <= wait_s <= WINDOW_S + 1
        now += wait_s
        assert held.begin(now) is None
        begun.append(now)
        held.end()
    for at in begun:
        assert sum(at - WINDOW_S < other <= at for other in begun) <= limit


@given(st.integers(1, 4), st.lists(st.booleans(), max_size=60))
def test_no_more_requests_run_than_the_limit(limit: int, steps: list[bool]) -> None:
    held, running = usage(at_once=limit), 0
    for begins in steps:
        if begins:
            let_in = held.begin(0.0) is None
            assert let_in == (running < limit)
            running += let_in
        elif running:
            held.end()
            running -= 1


def test_key_without_limits_is_never_refused() -> None:
    held = usage()
    assert [held.begin(0.0) for _ in range(1000)] == [None] * 1000


@pytest.mark.parametrize(
    ("limit", "workers", "share"), [(None, 4, None), (1, 4, 1), (8, 4, 2), (9, 4, 3), (5, 1, 5)]
)
def test_worker_has_its_share_of_a_limit_rounded_up(
    limit: int | None, workers: int, share: int | None
) -> None:
    assert share_of(limit, workers) == share


def test_changed_limit_counts_at_once() -> None:
    held = usage(per_minute=3)
    assert [held.begin(now) for now in (0.0, 1.0, 2.0)] == [None] * 3
    held.hold_to(Grant(id="a", hash=b"", scopes=(), per_minute=1), 1)
    assert held.begin(3.0) == 59
    held.hold_to(Grant(id="a", hash=b"", scopes=()), 1)
    assert held.begin(3.0) is None


@given(st.integers(1, 50), st.lists(st.tuples(st.floats(0, 30), st.integers(0, 40)), max_size=60))
def test_no_call_begins_while_a_minute_has_used_up_the_tokens(
    limit: int, calls: list[tuple[float, int]]
) -> None:
    held, now = usage(tokens_per_minute=limit), 1000.0
    taken: list[tuple[float, int]] = []

    def in_the_minute() -> int:
        return sum(tokens for at, tokens in taken if now - WINDOW_S < at)

    for pause, tokens in calls:
        now += pause
        wait_s = held.begin(now)
        assert (wait_s is None) == (in_the_minute() < limit)
        if wait_s is not None:
            assert 1 <= wait_s <= WINDOW_S + 1
            # Feedback is let in meanwhile.
            assert held.begin(now, takes_tokens=False) is None
            held.end()
            now += wait_s
            assert held.begin(now) is None
        held.spend(now, tokens)
        taken.append((now, tokens))
        held.end()


def test_tokens_count_by_worker_and_only_where_they_are_limited() -> None:
    held = usage(workers=4, tokens_per_minute=10)
    held.spend(0.0, 3)
    assert held.begin(0.0) == 60
    free = usage(per_minute=5)
    assert (free.counts_tokens, held.counts_tokens) == (False, True)
    free.spend(0.0, 1000)
    free.hold_to(Grant(id="a", hash=b"", scopes=(), tokens_per_minute=10), 1)
    assert free.begin(0.0) is None


# Tokens

REQUEST = b'{"model":"m"}'
CHAT = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
DETAILED = CHAT | {"prompt_tokens_details": {"cached_tokens": 100}}
ANTHROPIC = {"input_tokens": 7, "output_tokens": 5, "cache_read_input_tokens": 3}


def events(*values: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values)


@pytest.mark.parametrize(
    ("reply", "tokens"),
    [
        (json.dumps({"choices": [], "usage": CHAT}).encode(), 12),
        (json.dumps({"usage": DETAILED}, indent=1).encode(), 12),
        (json.dumps({"content": [], "usage": ANTHROPIC}).encode(), 15),
        # A stream that tells at its beginning and at its end, and one that tells all the time.
        (
            events(
                {"message": {"usage": {"input_tokens": 7, "output_tokens": 1}}},
                {"usage": {"output_tokens": 5}},
            ),
            12,
        ),
        (events({"usage": None}, {"usage": CHAT | {"completion_tokens": 1}}, {"usage": CHAT}), 12),
        # Without usage, the ids; those of the prompt once.
        (
            events(
                {"prompt_token_ids": [1, 2, 3], "choices": [{"token_ids": None}]},
                {"choices": [{"token_ids": [4]}]},
                {"choices": [{"token_ids": [5, 6]}]},
            ),
            6,
        ),
        # With neither, four bytes of the request a token, and each event of the reply.
        (events({"choices": []}, {"choices": []}), 4 + 2),
        (b"x" * 40, 4 + 10),
        # What a model says is not taken for what the server tells.
        (
            json.dumps(
                {"text": json.dumps({"usage": {"total_tokens": 1}}), "usage": CHAT}
            ).encode(),
            12,
        ),
        (b'{"usage": {"total_tokens": "many"}}', 4 + 9),
        (b'{"usage": {', 4 + 3),
        # There was no reply.
        (b"", 0),
    ],
)
def test_tokens_are_the_usages_or_the_ids_or_estimated(reply: bytes, tokens: int) -> None:
    assert tokens_of(REQUEST, reply) == tokens


def test_deflated_reply_is_inflated_for_its_usage() -> None:
    reply = json.dumps({"usage": CHAT}).encode()
    assert tokens_of(REQUEST, zlib.compress(reply), deflated=True) == 12


def test_very_long_reply_counts_by_its_length() -> None:
    reply = zlib.compress(b" " * (33 * 2**20))
    assert tokens_of(b"", reply, deflated=True) == 8 * 2**20


def test_error_costs_what_its_usage_says() -> None:
    refusal = b'{"error":{"message":"busy"}}'
    assert tokens_of(REQUEST, refusal) > 0
    assert tokens_of(REQUEST, refusal, refused=True) == 0
    assert tokens_of(REQUEST, b'{"error":{},"usage":{"total_tokens":3}}', refused=True) == 3


def test_usage_may_hold_costs_and_times() -> None:
    usage = b'{"usage":{"prompt_tokens":5,"completion_tokens":2,"queue_time":0.037,"cost":1e-5}}'
    assert tokens_of(REQUEST, usage) == 7
