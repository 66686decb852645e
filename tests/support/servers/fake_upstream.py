"""Script a model server for faults and load; it speaks just enough of vLLM's API."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from aiohttp import web

DONE = b"data: [DONE]\n\n"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeUpstream:
    """Answer chat completions by script, and keep what was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.owned_by = "vllm"
        self.models = ["m"]
        self.list_status = 200
        self.looks = 0
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.other: list[tuple[str, str, bytes]] = []
        self.behave: Handler | None = None
        self.behave_otherwise: Handler | None = None
        self.cancelled = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer any path."""
        body = await request.read()
        if request.path == "/v1/models":
            return self.list_models()
        if request.path != "/v1/chat/completions":
            self.other.append((request.method, request.raw_path, body))
            return await (self.behave_otherwise or echo)(request)
        self.headers.append(dict(request.headers))
        try:
            self.requests.append(json.loads(body))
        except ValueError:
            return web.json_response({"error": {"message": "JSON decode error"}}, status=400)
        if self.behave is not None:
            return await self.behave(request)
        asked = self.requests[-1]
        if asked.get("stream"):
            return await self.stream(request, asked)
        wants_tool = asked.get("tools") and asked["messages"][-1]["role"] == "user"
        reply = tool_call_reply if wants_tool else whole_reply
        return web.json_response(reply(asked, len(self.requests)))

    def list_models(self) -> web.Response:
        """List the base model as vLLM does, unless another status is wanted."""
        self.looks += 1
        if self.list_status != 200:
            return web.Response(status=self.list_status)
        model = {"owned_by": self.owned_by, "parent": None, "root": "m"}
        listed = [{"id": name} | model for name in self.models]
        return web.json_response({"object": "list", "data": listed})

    async def stream(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        """Send three chunks and the end."""
        chunks = stream_chunks(asked, len(self.requests))
        return await streams(*chunks, DONE)(request)

    def hold_streams(self) -> asyncio.Event:
        """Begin each stream, and end it once the event that is returned is set."""
        go_on = asyncio.Event()
        self.behave = streams(b'data: {"choices":[]}\n\n', DONE, waits=go_on)
        return go_on


def answers(body: Any, status: int = 200, **headers: str) -> Handler:
    """Answer every request with this JSON, or these bytes."""

    async def handle(_: web.Request) -> web.Response:
        if isinstance(body, bytes):
            return web.Response(body=body, status=status, headers=headers)
        return web.json_response(body, status=status, headers=headers)

    return handle


def streams(*pieces: bytes, waits: asyncio.Event | None = None, tears: bool = False) -> Handler:
    """Answer every request with a stream, which may wait before its last piece or end torn."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, piece in enumerate(pieces, 1):
            if waits is not None and number == len(pieces):
                await waits.wait()
            await response.write(piece)
        return await hang_up(request) if tears else response

    return handle


async def hang_up(request: web.Request) -> web.Response:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def echo(request: web.Request) -> web.Response:
    """Say again what was said."""
    return web.Response(body=b"other:" + await request.read(), headers={"x-upstream": "1"})


def whole_reply(asked: dict[str, Any], number: int) -> dict[str, Any]:
    """Make a reply of two tokens; ids and log-probabilities where they were asked for."""
    ids = asked.get("return_token_ids") is True
    logprobs = (
        {"content": [{"logprob": -0.5}, {"logprob": -1.5}]} if asked.get("logprobs") else None
    )
    return {
        "id": f"chatcmpl-{number}",
        "model": asked.get("model"),
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi"},
                "logprobs": logprobs,
                "finish_reason": "stop",
                "token_ids": [4, 5] if ids else None,
            }
        ],
        "usage": {"completion_tokens": 2},
        "prompt_token_ids": [1, 2, 3] if ids else None,
    }


def tool_call_reply(asked: dict[str, Any], number: int) -> dict[str, Any]:
    """Make a reply that asks for a tool, under an id of its own."""
    reply = whole_reply(asked, number)
    function = {"name": "calc", "arguments": "{}"}
    call = {"id": f"chatcmpl-tool-{uuid4().hex}", "type": "function", "function": function}
    reply["choices"][0]["message"] |= {"content": None, "tool_calls": [call]}
    return reply


def stream_chunks(asked: dict[str, Any], number: int) -> list[bytes]:
    """Make the same as a stream."""
    ids = asked.get("return_token_ids") is True
    wants = asked.get("logprobs") is True

    def chunk(delta: Any, token: int | None, **more: Any) -> dict[str, Any]:
        content = {"content": [{"logprob": -0.5}]} if wants and token else None
        choice = {"index": 0, "delta": delta, "logprobs": content, "finish_reason": None}
        choice |= {"token_ids": [token] if ids and token else None}
        return {"id": f"chatcmpl-{number}", "model": asked["model"], "choices": [choice | more]}

    head = chunk({"role": "assistant"}, None) | {"prompt_token_ids": [1, 2, 3] if ids else None}
    events = [head, chunk({"content": "h"}, 4), chunk({"content": "i"}, 5, finish_reason="stop")]
    return [b"data: " + json.dumps(e, separators=(",", ":")).encode() + b"\n\n" for e in events]


@asynccontextmanager
async def fake_upstream(port: int = 0) -> AsyncIterator[FakeUpstream]:
    """Run one, on a free port unless one is named."""
    upstream = FakeUpstream()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", upstream.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    upstream.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield upstream
    finally:
        await runner.cleanup()
