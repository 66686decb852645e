"""The allow-list: exact paths, the URL's prefix, and no spelling that climbs around it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import NotAllowed
from proxy.routes import Kind, find_route

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
]


@pytest.mark.parametrize("path", FORBIDDEN)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_admin_endpoints_are_refused_in_any_spelling(method: str, path: str) -> None:
    with pytest.raises(NotAllowed):
        find_route(method, path)


@given(st.text(alphabet="/.%2eflorad_apter1vmdslc", max_size=60))
def test_nothing_but_the_listed_paths_gets_through(path: str) -> None:
    try:
        route = find_route("POST", "/" + path)
    except NotAllowed:
        return
    assert "lora" not in route.path


def test_a_chat_call_is_recorded_and_models_are_forwarded() -> None:
    assert find_route("POST", "/v1/chat/completions").kind is Kind.CALL
    assert find_route("GET", "/v1/models").kind is Kind.FORWARD
    assert find_route("GET", "/v1/models/org/name@3").path == "/v1/models/org/name@3"
    assert find_route("POST", "/feedback").kind is Kind.FEEDBACK


def test_the_prefix_names_task_episode_and_agent() -> None:
    route = find_route("POST", "/task/t%201/episode/e7/agent/writer/v1/chat/completions")
    assert (route.task, route.episode, route.agent) == ("t 1", "e7", "writer")
    assert route.path == "/v1/chat/completions"


def test_prefix_parts_stand_alone_but_in_order() -> None:
    assert find_route("POST", "/agent/a/v1/chat/completions").agent == "a"
    with pytest.raises(NotAllowed):
        find_route("POST", "/agent/a/episode/e/v1/chat/completions")


def test_a_missing_v1_and_a_wrong_method_get_a_hint() -> None:
    with pytest.raises(NotAllowed, match="missing its /v1"):
        find_route("POST", "/chat/completions")
    with pytest.raises(NotAllowed, match="Use POST"):
        find_route("GET", "/v1/chat/completions")
