"""What would send a request elsewhere is found by its field, and what agents send is not."""

from typing import Any

import pytest

from proxy.formats.steering import goes_before, misspelt_name, named_models, place_name

PLACES: list[tuple[str, dict[str, Any]]] = [
    *((name, {name: "x"}) for name in ("api_base", "base_url", "api_key", "custom_llm_provider")),
    *((name, {name: "x"}) for name in ("apiBase", "baseURL", "API_KEY", "api-base")),
    *((name, {name: "x"}) for name in ("aws_sts_endpoint", "aws_role_name", "azure_ad_token")),
    *((name, {name: "x"}) for name in ("vertex_credentials", "s3_endpoint_url", "langfuse_host")),
    *((name, {name: {"a": "b"}}) for name in ("user_config", "litellm_params", "extra_headers")),
    ("model_list", {"model_list": [{"model_name": "m"}]}),
    ("litellm_credential_name", {"litellm_credential_name": "prod"}),
    ("bootstrap_host", {"bootstrap_host": "10.0.0.1"}),
    ("api_base", {"extra_body": {"api_base": "http://x"}}),
    ("api_base", {"extra_body": {"extra_body": {"api_base": "http://x"}}}),
    ("langfuse_host", {"metadata": {"langfuse_host": "http://x"}}),
    ("langsmith_api_key", {"litellm_metadata": {"langsmith_api_key": "k"}}),
]
# Fields of the four APIs, of vLLM and of tools, which say nothing of the kind.
PLAIN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "api_base"}],
    "prompt_cache_key": "k",
    "max_tokens": 5,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "mcp", "server_url": "https://mcp.example", "headers": {"a": "b"}}],
    "metadata": {"host": "build-7", "session_id": "s", "run": "9"},
    "api_base": None,
    "web_search_options": {},
    "return_token_ids": True,
    "priority": 0,
}


@pytest.mark.parametrize(("name", "fields"), PLACES)
def test_a_field_that_says_where_to_or_with_whose_key_is_found(
    name: str, fields: dict[str, Any]
) -> None:
    assert place_name(fields) == name


def test_fields_that_agents_send_are_not_taken_for_places() -> None:
    assert place_name(PLAIN) is None
    assert not goes_before(PLAIN)
    assert misspelt_name(PLAIN | {"Custom": 1, "repetitionPenalty": 1}) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "x@1"},
        {"model": ["x@1"]},
        {"fallbacks": ["m", "x@1"]},
        {"fallbacks": [{"model": "x@1", "messages": []}]},
        {"fallbacks": [{"m": ["n", "x@1"]}]},
        {"models": ["x@1"], "route": "fallback"},
        {"plugins": [{"id": "fusion", "model": "x@1"}]},
        {"tools": [{"type": "image_generation", "model": "x@1"}]},
        {"lora_path": "x@1"},
        {"extra_body": {"anything": {"x@1": 1}}},
    ],
)
def test_a_model_is_named_in_any_field(fields: dict[str, Any]) -> None:
    assert "x@1" in {text for _, text in named_models(fields)}


def test_words_and_ids_name_no_model() -> None:
    fields = {"user": "me@1", "prompt": "x@1", "metadata": {"a": "x@1"}, "stop": ["x@1"]}
    tools = [{"type": "function", "function": {"name": "f", "description": "x@1"}}]
    assert list(named_models(fields | {"messages": ["x@1"], "tools": tools, "n": 1})) == []


@pytest.mark.parametrize("priority", [1, -5, "-1", 0.5, True])
def test_a_place_in_the_queue_is_a_wish(priority: object) -> None:
    assert goes_before({"priority": priority})
    assert not goes_before({"priority": None})
    assert not goes_before({"priority": "0"})


def test_a_name_that_some_servers_take_for_another_is_found() -> None:
    for name in ("Model", "MODEL", "Previous_Response_ID", "me\u017f\u017fages"):
        assert misspelt_name({"temperature": 1, name: "x"}) == name
