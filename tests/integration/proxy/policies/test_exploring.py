"""Exploration through the whole proxy: what the server gets, the client sees, the store keeps."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.exploring import is_chosen
from store.read.lines import encoded_line
from store.records import TransitionRow
from store.version_states import ensure_base
from tests.integration.conftest import Proxy, Reply, StartProxy
from tests.support.recordings import recordings
from tests.support.servers.fake_upstream import FakeUpstream, answers, hang_up
from tests.support.waiting import eventually

FILE = """
[[policy]]
name = "all"
base = "m"
agents = ["explorer"]
[policy.explore]
share = 1.0
temperature = 0.7
drop_strict = true

[[policy]]
name = "half"
base = "m"
agents = ["half"]
explore = { share = 0.5, temperature = 0.7 }

[[policy]]
name = "never"
base = "m"
models = ["m"]
"""
SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"name": "calc", "parameters": SCHEMA, "strict": True}
QUESTION = [{"role": "user", "content": "q"}]
ASKED: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": QUESTION,
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "completions": {"prompt": "q"},
    "messages": {
        "messages": QUESTION,
        "max_tokens": 9,
        "tools": [{"name": "calc", "input_schema": SCHEMA, "strict": True}],
    },
    "responses": {"input": "q", "tools": [{"type": "function", **FUNCTION}]},
}
PATHS = sorted(ASKED)
NAMES = {"x-pawl-episode": "e", "x-pawl-agent": "explorer"}


@pytest.fixture
async def exploring(
    engine: AsyncEngine, upstream: FakeUpstream, start_proxy: StartProxy, tmp_path: Path
) -> AsyncIterator[Proxy]:
    """A proxy that reads such a file; `m`, which it waits for, has no version yet."""
    async with engine.begin() as connection:
        for policy in ("all", "half", "never"):
            await ensure_base(connection, policy, "m")
    path = tmp_path / "policies.toml"
    path.write_text(FILE)
    upstream.behave_otherwise = other_formats
    async with start_proxy(policies=path) as proxy:
        yield proxy


async def other_formats(request: web.Request) -> web.StreamResponse:
    """A real vLLM's recorded response, or a text completion."""
    asked = await request.json()
    streamed = bool(asked.get("stream"))
    kind = "text/event-stream" if streamed else "application/json"
    if request.path == "/v1/responses":
        name = f"responses_text_{'streamed' if streamed else 'whole'}"
        body = recordings("responses")[name]["upstream"].encode()
    else:
        choice = {"index": 0, "text": "hi", "finish_reason": "stop", "token_ids": [4, 5]}
        choice |= {"logprobs": {"token_logprobs": [-0.5, -1.5]}, "prompt_token_ids": [1, 2]}
        said = json.dumps({"id": "cmpl-1", "model": "m", "choices": [choice]}).encode()
        body = b"data: %b\n\ndata: [DONE]\n\n" % said if streamed else said
    return web.Response(body=body, content_type=kind)


async def post(proxy: Proxy, path: str, names: dict[str, str] | None = None, **more: Any) -> Reply:
    body = {"model": "m", "temperature": 0, "seed": 3} | ASKED[path] | more
    return await proxy.ask("POST", f"/v1/{path}", NAMES if names is None else names, **body)


def sent(upstream: FakeUpstream) -> dict[str, Any]:
    """The last request that reached the server."""
    if upstream.requests:
        return upstream.requests[-1]
    asked: dict[str, Any] = json.loads(upstream.other[-1][2])
    return asked


async def recorded(proxy: Proxy, calls: int = 1) -> list[TransitionRow]:
    return [call for episode in await proxy.episodes(calls) for call in episode.calls]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_explored_greedy_call_is_sampled_trainable_and_shown_in_a_header(
    exploring: Proxy, upstream: FakeUpstream, path: str, streamed: bool
) -> None:
    reply = await post(exploring, path, stream=streamed)
    assert reply.status == 200
    asked = sent(upstream)
    assert asked["temperature"] == 0.7
    assert "seed" not in asked
    assert "strict" not in json.dumps(asked.get("tools"))
    told = {"temperature": 0.7, "seed": None} | ({"strict": None} if "tools" in asked else {})
    shown = [name if value is None else f"{name}={value}" for name, value in told.items()]
    assert reply.headers["x-pawl-explored"] == ", ".join(shown)
    call = await exploring.only_call()
    assert (call.policy, call.reason, call.trainable) == ("all", None, True)
    assert call.sampling["explored"] == told
    assert call.sampling["temperature"] == 0.7
    assert call.sampling.keys().isdisjoint({"strict_tools", "seed"})
    # As it was sent.
    request = json.loads(call.request or b"")
    assert (request["temperature"], request["seed"]) == (0, 3)
    assert request.get("tools") == ASKED[path].get("tools")


async def test_unexplored_call_is_sent_and_recorded_unchanged(
    exploring: Proxy, upstream: FakeUpstream
) -> None:
    before = await counted(exploring)
    for names in (
        {"x-pawl-episode": "e", "x-pawl-agent": "other"},
        NAMES | {"x-pawl-split": "eval"},
        NAMES | {"x-pawl-task": "eval/1"},
    ):
        reply = await post(exploring, "chat/completions", names)
        assert "x-pawl-explored" not in reply.headers
        assert (sent(upstream)["temperature"], sent(upstream)["seed"]) == (0, 3)
        assert sent(upstream)["tools"] == ASKED["chat/completions"]["tools"]
    for pinned in ("all@0", "half@0"):
        reply = await post(exploring, "chat/completions", model=pinned)
        assert reply.headers["x-pawl-policy"] == pinned
        assert "x-pawl-explored" not in reply.headers
    calls = await recorded(exploring, 5)
    assert {call.reason for call in calls} == {"greedy"}
    assert not any("explored" in call.sampling for call in calls)
    assert await counted(exploring) == before


async def counted(proxy: Proxy) -> dict[str, float]:
    found = await proxy.counters("pawl_calls_explored_total{")
    return {name: number for name, number in found.items() if number}


async def test_explored_calls_are_counted_by_policy_and_changed_setting_and_exported(
    exploring: Proxy,
) -> None:
    before = await counted(exploring)
    await post(exploring, "chat/completions")
    await post(exploring, "completions", stream=True)
    named = {
        kind: f'pawl_calls_explored_total{{kind="{kind}",policy="all"}}'
        for kind in ("temperature", "seed", "strict")
    }

    async def all_counted() -> bool:
        found = await counted(exploring)
        grown = {kind: found.get(name, 0) - before.get(name, 0) for kind, name in named.items()}
        return grown == {"temperature": 2, "seed": 2, "strict": 1}

    await eventually(all_counted)
    [episode] = await exploring.episodes(2)
    line = json.loads(encoded_line(episode, episode.last_call_at))
    assert [call["explored"] for call in line["calls"]] == [
        {"temperature": 0.7, "seed": None, "strict": None},
        {"temperature": 0.7, "seed": None},
    ]


async def test_episode_explores_with_all_its_calls_or_with_none(
    exploring: Proxy, upstream: FakeUpstream
) -> None:
    for number in range(12):
        names = {"x-pawl-episode": f"run-{number}", "x-pawl-agent": "half"}
        chosen = is_chosen(f"run-{number}", 0.5)
        for _ in range(2):
            reply = await post(exploring, "completions", names)
            assert ("x-pawl-explored" in reply.headers) is chosen
            assert json.loads(upstream.other[-1][2])["temperature"] == (0.7 if chosen else 0)


async def test_calls_joined_by_a_repeated_reply_explore_together(
    exploring: Proxy, upstream: FakeUpstream
) -> None:
    """The request's change is not the client's: what a call repeats is found as ever."""
    names = {"x-pawl-agent": "half"}
    tools = [{"type": "function", "function": FUNCTION | {"strict": False}}]
    explored = []
    for _ in range(8):
        first = await post(exploring, "chat/completions", names, tools=tools)
        said = first.json["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "4"}
        both = [*QUESTION, said, result]
        second = await post(exploring, "chat/completions", names, tools=tools, messages=both)
        assert second.headers["x-pawl-episode"] == first.headers["x-pawl-episode"]
        pair = {"x-pawl-explored" in reply.headers for reply in (first, second)}
        assert len(pair) == 1
        explored += pair
    assert len(await exploring.episodes(16)) == 8
    # One in 128 runs would show all alike.
    assert explored == [is_chosen(e.key, 0.5) for e in await exploring.episodes(16)]


async def test_refused_explored_request_is_sent_again_as_the_client_wrote_it(
    exploring: Proxy, upstream: FakeUpstream
) -> None:
    async def refuse_change(request: web.Request) -> web.StreamResponse:
        if upstream.requests[-1]["temperature"]:
            return web.json_response({"error": {"message": "too warm"}}, status=400)
        return web.json_response({"id": "c", "choices": []})

    upstream.behave = refuse_change
    reply = await post(exploring, "chat/completions")
    assert reply.status == 200
    assert "x-pawl-explored" not in reply.headers
    assert [asked["temperature"] for asked in upstream.requests] == [0.7, 0]
    assert upstream.requests[1]["seed"] == 3
    assert upstream.requests[1]["tools"] == ASKED["chat/completions"]["tools"]
    call = await exploring.only_call()
    assert "explored" not in call.sampling
    assert call.sampling["temperature"] == 0


OVERLOADED = answers({"error": {"message": "overloaded"}}, 503)


async def test_failed_explored_call_has_the_header_of_explored_settings(
    exploring: Proxy, upstream: FakeUpstream
) -> None:
    for behave, status in ((OVERLOADED, 503), (hang_up, 502)):
        upstream.behave = behave
        reply = await post(exploring, "chat/completions")
        assert reply.status == status
        assert reply.headers["x-pawl-explored"] == "temperature=0.7, seed, strict"
    assert [call.reason for call in await recorded(exploring, 2)] == ["error_reply", "incomplete"]


async def test_sdk_retry_explores_if_and_only_if_its_failed_attempt_did(
    exploring: Proxy, upstream: FakeUpstream
) -> None:
    names = {"x-pawl-agent": "half"}
    for number in range(6):
        upstream.behave = OVERLOADED
        first = await post(exploring, "chat/completions", names, tools=[], user=f"u{number}")
        upstream.behave = None
        retried = names | {"x-stainless-retry-count": "1"}
        second = await post(exploring, "chat/completions", retried, tools=[], user=f"u{number}")
        assert second.status == 200
        assert second.headers["x-pawl-episode"] == first.headers["x-pawl-episode"]
        assert second.headers.get("x-pawl-explored") == first.headers.get("x-pawl-explored")


async def test_call_to_a_server_without_token_ids_does_not_explore(
    exploring: Proxy, upstream: FakeUpstream
) -> None:
    upstream.owned_by = "someone"
    reply = await post(exploring, "chat/completions")
    assert "x-pawl-explored" not in reply.headers
    assert sent(upstream)["temperature"] == 0


async def test_call_to_which_no_fields_may_be_added_does_not_explore(
    exploring: Proxy, upstream: FakeUpstream
) -> None:
    reply = await post(exploring, "completions", echo=True)
    assert "x-pawl-explored" not in reply.headers
    assert json.loads(upstream.other[-1][2])["temperature"] == 0
    assert (await exploring.only_call()).reason is not None
