"""A provider reached through litellm: OpenAI's words both ways, recorded, not trained.

Runs where litellm is installed (`requirements/litellm.txt`): it wants an older openai than the
other development tools.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine

from store.version_states import ensure_base
from tests.integration.conftest import Proxy, Reply, proxy_with, settings_for
from tests.support.servers.fake_upstream import FakeUpstream, fake_upstream
from tests.support.waiting import PATIENCE_S

pytest.importorskip("litellm", reason="litellm is not installed: requirements/litellm.txt")
# pydantic's and asyncio's warnings about litellm's own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")

FILE = """
[[upstream]]
name = "local"
urls = ["{local}"]
default = true

[[upstream]]
name = "provider"
kind = "litellm"
provider = "openai"
urls = ["{provider}"]
models = ["far", "far-*"]
api_key_env = "PROVIDER_KEY"

[[upstream]]
name = "mock"
kind = "litellm"
provider = "openai"
models = ["mock"]
options = {{ mock_response = "mocked" }}
"""


@dataclass
class Setup:
    """A proxy whose far models are reached through litellm."""

    proxy: Proxy
    provider: FakeUpstream

    async def post(self, path: str, **body: Any) -> Reply:
        """POST to any path."""
        url = self.proxy.url + path
        async with self.proxy.session.post(url, json=body) as reply:
            return Reply(reply.status, reply.headers, await reply.read())


@pytest.fixture
async def setup(
    database_url: str, engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Setup]:
    monkeypatch.setenv("PROVIDER_KEY", "sk-ours")
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    async with AsyncExitStack() as exits:
        local = await exits.enter_async_context(fake_upstream())
        provider = await exits.enter_async_context(fake_upstream())
        path = tmp_path / "upstreams.toml"
        path.write_text(FILE.format(local=local.url, provider=provider.url))
        settings = settings_for(database_url, local.url, tmp_path)
        settings = settings.model_copy(update={"upstreams": path, "silence_s": 2.0})
        proxy = await exits.enter_async_context(proxy_with(settings, engine))
        yield Setup(proxy, provider)


async def test_whole_reply_of_a_litellm_provider_has_openais_format_and_is_not_trained(
    setup: Setup,
) -> None:
    response = await setup.proxy.chat(
        model="far-1", temperature=0.5, headers={"Authorization": "Bearer client"}
    )
    assert response.status == 200
    assert response.headers["Content-Type"] == "application/json"
    seen = response.json
    assert (seen["model"], seen["object"]) == ("far-1", "chat.completion")
    assert seen["choices"][0]["message"]["content"] == "hi"
    messages = [{"role": "user", "content": "q"}]
    assert setup.provider.requests == [{"model": "far-1", "messages": messages, "temperature": 0.5}]
    assert setup.provider.headers[0]["Authorization"] == "Bearer sk-ours"
    call = await setup.proxy.only_call()
    assert (call.status, call.trainable, call.reason) == ("complete", False, "no_token_ids")
    assert json.loads(call.reply or b"") == seen


async def test_tool_call_of_a_litellm_provider_has_openais_format(setup: Setup) -> None:
    tool = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
    response = await setup.proxy.chat(model="far", tools=[tool])
    message = response.json["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "calc", "arguments": "{}"}
    assert setup.provider.requests[0]["tools"] == [tool]


async def test_stream_of_a_litellm_provider_has_openais_format(setup: Setup) -> None:
    response = await setup.proxy.chat(
        model="far", stream=True, stream_options={"include_usage": True}
    )
    assert response.headers["Content-Type"].startswith("text/event-stream")
    *events, done = response.body.decode().split("\n\n")[:-1]
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["model"] for chunk in chunks} == {"far"}
    said = [choice["delta"].get("content") for c in chunks for choice in c["choices"]]
    assert "".join(filter(None, said)) == "hi"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] > 0
    call = await setup.proxy.only_call()
    assert (call.status, call.reason) == ("complete", "no_token_ids")
    assert json.loads(call.reply or b"")["choices"][0]["message"]["content"] == "hi"


async def test_chunks_of_a_litellm_stream_arrive_at_once_and_a_leaving_client_stops_it(
    setup: Setup,
) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        choice = {"index": 0, "delta": {"role": "assistant", "content": "x"}, "finish_reason": None}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "far"}
        event = b"data: %s\n\n" % json.dumps(chunk | {"choices": [choice]}).encode()
        try:
            while True:
                await response.write(event)
                await asyncio.sleep(0.01)
        except (asyncio.CancelledError, ConnectionError):
            setup.provider.cancelled.set()
            raise

    setup.provider.behave = endless
    url = f"{setup.proxy.url}/v1/chat/completions"
    asked = {"model": "far", "stream": True, "messages": [{"role": "user", "content": "q"}]}
    async with setup.proxy.session.post(url, json=asked) as response:
        assert b'"x"' in await response.content.readany()
        response.close()
    await asyncio.wait_for(setup.provider.cancelled.wait(), PATIENCE_S)
    assert (await setup.proxy.only_call()).status == "client_gone"


async def test_litellm_stream_that_breaks_off_ends_truncated_for_the_client(setup: Setup) -> None:
    async def torn(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        choice = {"index": 0, "delta": {"role": "assistant", "content": "x"}, "finish_reason": None}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "far"}
        await response.write(b"data: %s\n\n" % json.dumps(chunk | {"choices": [choice]}).encode())
        assert request.transport is not None
        request.transport.abort()
        return response

    setup.provider.behave = torn
    with pytest.raises(aiohttp.ClientPayloadError):
        await setup.proxy.chat(model="far", stream=True)
    assert len(setup.provider.requests) == 1
    call = await setup.proxy.only_call()
    assert (call.status, call.reason) == ("truncated", "incomplete")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
async def test_error_of_a_litellm_provider_keeps_status_and_message_and_is_not_retried(
    setup: Setup, status: int, stream: bool
) -> None:
    said = {"message": "not so", "type": "some_type", "param": "p", "code": "c"}

    async def failing(_: web.Request) -> web.Response:
        return web.json_response({"error": said}, status=status, headers={"Retry-After": "7"})

    setup.provider.behave = failing
    response = await setup.proxy.chat(model="far", stream=stream)
    assert response.status == status
    # Of some statuses litellm keeps the provider's whole object, of others the message alone.
    assert set(response.json["error"]) == set(said)
    assert response.json["error"]["message"].endswith("not so")
    assert response.headers["Retry-After"] == "7"
    assert len(setup.provider.requests) == 1
    assert (await setup.proxy.only_call()).reason == "error_reply"


async def test_litellm_provider_that_breaks_off_is_not_asked_again(setup: Setup) -> None:
    async def gone(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    setup.provider.behave = gone
    response = await setup.proxy.chat(model="far")
    assert response.status >= 500
    assert "error" in response.json
    assert len(setup.provider.requests) == 1


async def test_silent_litellm_provider_is_504_without_a_retry(setup: Setup) -> None:
    async def silent(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    setup.provider.behave = silent
    response = await setup.proxy.chat(model="far")
    assert response.status == 504
    assert response.json["error"]["code"] == "upstream_silent"
    assert response.headers["x-pawl-fault"] == "upstream"
    assert len(setup.provider.requests) == 1
    assert (await setup.proxy.only_call()).status == "upstream_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_api_key_that_a_provider_echoes_is_hidden_from_the_client(
    setup: Setup, stream: bool
) -> None:
    async def say(request: web.Request) -> web.Response:
        told = {"message": f"Received {request.headers['Authorization']}", "code": "bad_key"}
        return web.json_response({"error": told}, status=401)

    setup.provider.behave = setup.provider.behave_otherwise = say
    for response in (
        await setup.proxy.chat(model="far", stream=stream),
        await setup.post("/v1/embeddings", model="far", input=["a"]),
    ):
        assert response.status == 401
        assert "Received Bearer ***" in response.json["error"]["message"]
        assert b"sk-ours" not in response.body
    assert b"sk-ours" not in ((await setup.proxy.only_call()).reply or b"")


async def test_litellms_mock_reply_is_passed_on_and_not_trained(setup: Setup) -> None:
    response = await setup.proxy.chat(model="mock")
    assert response.json["choices"][0]["message"]["content"] == "mocked"
    assert (await setup.proxy.only_call()).reason == "no_token_ids"


async def test_embeddings_of_a_litellm_provider_have_openais_format(setup: Setup) -> None:
    vector = {"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}
    usage = {"prompt_tokens": 1, "total_tokens": 1}

    async def embed(_: web.Request) -> web.Response:
        reply = {"object": "list", "model": "x", "data": [vector], "usage": usage}
        return web.json_response(reply)

    setup.provider.behave_otherwise = embed
    response = await setup.post("/v1/embeddings", model="far", input=["a"])
    assert response.status == 200
    assert response.json["model"] == "far"
    assert response.json["data"] == [vector]
    [(method, path, asked)] = setup.provider.other
    assert (method, path) == ("POST", "/v1/embeddings")
    assert json.loads(asked)["input"] == ["a"]


async def test_list_of_models_has_the_litellm_models_configured_by_full_name(setup: Setup) -> None:
    async with setup.proxy.session.get(f"{setup.proxy.url}/v1/models") as reply:
        listed = [(model["id"], model["owned_by"]) for model in (await reply.json())["data"]]
    assert listed == [("m", "vllm"), ("far", "provider"), ("mock", "mock")]
    async with setup.proxy.session.get(f"{setup.proxy.url}/v1/models/far-9") as reply:
        assert (await reply.json())["id"] == "far-9"


async def test_responses_and_messages_are_refused_for_litellm_models_in_their_error_formats(
    setup: Setup,
) -> None:
    asked = {"model": "far", "input": "q", "messages": [], "max_tokens": 1}
    responses = await setup.post("/v1/responses", **asked)
    assert (responses.status, responses.headers["x-pawl-fault"]) == (400, "client")
    assert responses.json["error"]["code"] == "unsupported_api"
    messages = await setup.post("/v1/messages", **asked)
    assert messages.status == 400
    assert messages.json["type"] == "error"
    assert "not /v1/messages" in messages.json["error"]["message"]
    assert not setup.provider.requests


async def test_client_cannot_choose_the_server_of_a_litellm_call(setup: Setup) -> None:
    response = await setup.proxy.chat(model="far", api_base="http://127.0.0.1:9/v1")
    assert (response.status, response.json["error"]["param"]) == (400, "api_base")
