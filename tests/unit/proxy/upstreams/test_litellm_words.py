"""OpenAI's words to litellm's and back."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.errors import BadRequest
from proxy.upstreams.file import UpstreamSpec
from proxy.upstreams.litellm import (
    CHAT,
    EMBEDDINGS,
    chunk_event,
    hidden_words,
    provider_error_body,
    read_litellm_request,
    retry_headers,
    status_of,
    whole_reply,
)

MESSAGES = [{"role": "user", "content": "q"}]


def body(**more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": MESSAGES} | more).encode()


def test_fields_of_openais_api_become_arguments_of_litellm() -> None:
    asked = read_litellm_request(CHAT, body(temperature=0.5, stream=True, seed=None), "u")
    assert (asked.model, asked.stream) == ("m", True)
    assert asked.arguments == {"messages": MESSAGES, "temperature": 0.5, "stream": True}


def test_clients_metadata_is_not_passed_to_litellm() -> None:
    assert "metadata" not in read_litellm_request(CHAT, body(metadata={"run": "1"}), "u").arguments


@pytest.mark.parametrize(
    "field",
    [
        *("api_base", "base_url", "api_key", "mock_response", "custom_llm_provider", "fallbacks"),
        *("extra_headers", "callbacks", "vertex_credentials", "aws_role_name", "num_retries"),
    ],
)
def test_client_cannot_choose_litellms_server_or_credentials(field: str) -> None:
    with pytest.raises(BadRequest, match=f"{field} is not a field that upstream 'u'") as caught:
        read_litellm_request(CHAT, body(**{field: "http://evil"}), "u")
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("path", "sent", "named"),
    [
        ("/v1/responses", body(), "answers /v1/chat/completions and /v1/embeddings here, not"),
        ("/v1/messages", body(), "not /v1/messages"),
        ("/tokenize", body(), "not /tokenize"),
        (CHAT, b"[]", "not a JSON object"),
        (CHAT, b'{"messages": []}', "model is missing"),
        (CHAT, b'{"model": "m"}', "messages is missing"),
        (CHAT, body(tools=[{"type": "mcp", "server_url": "litellm_proxy"}]), "type mcp"),
        (EMBEDDINGS, b'{"model": "m"}', "input is missing"),
    ],
)
def test_request_that_litellm_cannot_express_is_refused(path: str, sent: bytes, named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        read_litellm_request(path, sent, "u")


def test_litellm_reply_has_openais_null_fields_and_the_requested_model_name() -> None:
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    reply = {"id": "c", "model": "x", "choices": [{"index": 0, "message": {"tool_calls": [call]}}]}
    told = json.loads(whole_reply(reply, "m"))
    assert told["model"] == "m"
    [choice] = told["choices"]
    assert choice["message"] == {"tool_calls": [call], "content": None}
    assert choice["finish_reason"] is None
    assert choice["logprobs"] is None


def test_usage_chunk_of_a_litellm_stream_has_no_choice() -> None:
    choice = {"index": 0, "delta": {}}
    event = chunk_event({"id": "c", "choices": [choice], "usage": {"total_tokens": 1}}, "m")
    assert event.endswith(b"\n\n")
    assert json.loads(event[6:]) == {
        "id": "c",
        "choices": [],
        "usage": {"total_tokens": 1},
        "model": "m",
    }
    last = chunk_event({"choices": [choice | {"finish_reason": "stop"}], "usage": {}}, "m")
    assert json.loads(last[6:])["choices"][0]["finish_reason"] == "stop"


def test_providers_error_is_answered_in_openais_shape() -> None:
    said = {"message": "slow down", "type": "rate_limit", "code": "rl", "param": None}
    headers = {"retry-after": "7", "date": "now"}
    error: Any = SimpleNamespace(status_code=429, body=said, litellm_response_headers=headers)
    assert status_of(error) == 429
    assert json.loads(provider_error_body(error)) == {"error": said}
    assert retry_headers(error) == [(b"retry-after", b"7")]


def test_litellm_error_without_details_is_answered_with_502_and_its_first_line() -> None:
    error = ValueError('no route\nTraceback (most recent call last):\n  File "/secret/place.py"')
    assert (status_of(error), retry_headers(error)) == (502, [])
    assert json.loads(provider_error_body(error))["error"] == {
        "message": "no route",
        "type": "upstream_error",
        "param": None,
        "code": None,
    }


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (
            "Cannot connect to host inner.example:8443 ssl:default",
            "Cannot connect to host far ssl:default",
        ),
        ("https://inner.example:8443/v1/chat/completions: 404", "far/chat/completions: 404"),
        ("no https://inner.example:8443/v1?key=sk-ours", "no far?key=***"),
        ("see https://other.example/", "see https://other.example/"),
    ],
)
def test_error_message_shows_clients_no_key_and_no_address_of_a_provider(
    told: str, shown: str
) -> None:
    spec = UpstreamSpec(
        name="far", kind="litellm", urls=("https://inner.example:8443/v1",), models=("m",)
    )
    for word, instead in hidden_words(spec, "sk-ours").items():
        told = told.replace(word, instead)
    assert told == shown
