"""The allow-list: exact paths, the URL's prefix, and no spelling that climbs around it."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import NotAllowed
from proxy.formats.registry import FORMATS
from proxy.routing import RULES, exact_routes, find_route

FORBIDDEN = [
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1//load_lora_adapter",
    "/v1/./load_lora_adapter",
    "/v1/models/../load_lora_adapter",
    "/v1/models/%2e%2e/load_lora_adapter",
    "/v1/chat/completions/../../load_lora_adapter",
    "/V1/load_lora_adapter",
    "/v1/load%5Flora_adapter",
    "/episode/e/v1/load_lora_adapter",
    "/episode/..%2fv1/load_lora_adapter",
    "/sleep",
    "/reset_prefix_cache",
    "/collective_rpc",
    "/metrics",
    "/docs",
    "/",
    "",
    "/v1/chat/completions/",
    "/v1/chat/completions;x",
    "//v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/Batch",
    "/v1/responses/RENDER",
    "/v1/responses/Derender/input_items",
]


@pytest.mark.parametrize("path", FORBIDDEN)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_admin_endpoints_are_refused_in_any_spelling(method: str, path: str) -> None:
    with pytest.raises(NotAllowed):
        find_route(method, path)


@given(st.text(alphabet="/.%2eflorad_apter1vmdslc", max_size=60))
def test_no_path_that_names_lora_adapters_gets_through(path: str) -> None:
    try:
        route = find_route("POST", "/" + path)
    except NotAllowed:
        return
    assert "lora" not in route.path


def test_a_chat_call_is_recorded_and_models_are_forwarded() -> None:
    assert find_route("POST", "/v1/chat/completions").wire_format is FORMATS["chat"]
    assert find_route("GET", "/v1/models").wire_format is None
    assert find_route("GET", "/v1/models/org/name@3").path == "/v1/models/org/name@3"
    assert find_route("POST", "/feedback").scope == "feedback"


def test_parts_of_the_path_prefix_may_stand_alone_but_only_in_order() -> None:
    assert find_route("POST", "/agent/a/v1/chat/completions").agent == "a"
    with pytest.raises(NotAllowed):
        find_route("POST", "/agent/a/episode/e/v1/chat/completions")


def test_path_with_missing_or_needless_v1_or_wrong_method_is_refused_with_a_hint() -> None:
    with pytest.raises(NotAllowed, match="missing its /v1"):
        find_route("POST", "/chat/completions")
    with pytest.raises(NotAllowed, match="It is /feedback, without /v1"):
        find_route("POST", "/v1/feedback")
    with pytest.raises(NotAllowed, match="Use POST"):
        find_route("GET", "/v1/messages")


OF_OPENAI = [
    ("GET", "/v1/files"),
    ("GET", "/v1/files/file-1/content"),
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/v1/images/generations"),
    ("GET", "/v1/responses/resp_1"),
    ("POST", "/v1/responses/resp_1/cancel"),
    ("GET", "/v1/chat/completions/chatcmpl-1/messages"),
    ("DELETE", "/v1/models/ft:gpt:1"),
    ("GET", "/v1/organization/projects/p/api_keys"),
]


@pytest.mark.parametrize(("method", "path"), OF_OPENAI)
def test_the_rest_of_openais_api_is_forwarded(method: str, path: str) -> None:
    route = find_route(method, "/episode/e" + path)
    assert (route.wire_format, route.path, route.episode) == (None, path, "e")
    assert route.label.startswith("/v1/")
    assert "1" not in route.label.removeprefix("/v1/")


# What a client of the model may ask of vLLM; `{…}` as in its source.
FOR_CLIENTS = {
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/audio/voices",
    "/tokenize",
    "/detokenize",
}


def vllm_paths() -> list[str]:
    """Every path that the installed vLLM's source names for a route."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    declared = re.compile(
        r"""(?:router|app)\.(?:get|post|put|delete|patch|head|api_route|websocket|route)"""
        r"""\(\s*f?"(/[^"]*)\""""
    )
    sources = Path(spec.origin).parent.rglob("*.py")
    found = {path for source in sources for path in declared.findall(source.read_text())}
    assert "/v1/load_lora_adapter" in found
    assert len(found) > 40
    return sorted(found - FOR_CLIENTS)


@pytest.mark.vllm
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
def test_no_other_path_of_vllm_gets_through(method: str) -> None:
    for path in vllm_paths():
        with pytest.raises(NotAllowed):
            find_route(method, re.sub(r"\{[^}]*\}", "x", path))


def test_paths_that_tenants_reach_beside_calls_are_listed() -> None:
    # Whoever adds a path here has to look at what a body of it, JSON or a form, may name by an id
    # that the provider keeps for all tenants (`proxy.tenants`).
    beside = {
        rule.label for _, _, rule in RULES if not (rule.reaches_stored or rule.manages_account)
    }
    assert beside == {
        *("/v1/audio", "/v1/images", "/v1/moderations", "/v1/content_provenance_checks"),
    }
    exact = {route.path for route in exact_routes(FORMATS.values()).values()}
    assert exact - {one.path for one in FORMATS.values()} == {
        *("/v1/embeddings", "/v1/models", "/tokenize", "/detokenize", "/feedback"),
        "/v1/messages/count_tokens",
    }
    for path in ("/v1/realtime/client_secrets", "/v1/audio/voices", "/v1/uploads/u1/parts"):
        assert find_route("POST", path).reaches_stored
