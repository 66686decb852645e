"""How many tokens a call took, from the bytes of its reply."""

import json
import zlib
from typing import Any

import pytest

from proxy.keys.limits import tokens_of

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
def test_the_server_tells_or_the_ids_do_or_it_is_estimated(reply: bytes, tokens: int) -> None:
    assert tokens_of(REQUEST, reply) == tokens


def test_a_deflated_reply_is_counted_like_any_other() -> None:
    reply = json.dumps({"usage": CHAT}).encode()
    assert tokens_of(REQUEST, zlib.compress(reply), deflated=True) == 12


def test_a_reply_too_long_to_be_looked_through_counts_by_its_length() -> None:
    reply = zlib.compress(b" " * (33 * 2**20))
    assert tokens_of(b"", reply, deflated=True) == 8 * 2**20


def test_an_error_costs_what_it_says_and_no_more() -> None:
    refusal = b'{"error":{"message":"busy"}}'
    assert tokens_of(REQUEST, refusal) > 0
    assert tokens_of(REQUEST, refusal, refused=True) == 0
    assert tokens_of(REQUEST, b'{"error":{},"usage":{"total_tokens":3}}', refused=True) == 3


def test_a_usage_may_tell_costs_and_times_too() -> None:
    usage = b'{"usage":{"prompt_tokens":5,"completion_tokens":2,"queue_time":0.037,"cost":1e-5}}'
    assert tokens_of(REQUEST, usage) == 7
