"""A plain OpenAI-compatible server that knows nothing of Pawl: it says what it is told to say."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

# From the model that is asked for and the conversation so far to a text, or a tool's arguments.
Reply = str | tuple[str, dict[str, Any]]
Model = Callable[[str, list[dict[str, Any]]], Reply]


class PlainServer:
    """Answers chat completions and responses; `paths` and `headers` are those of its requests."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.url = ""
        self.paths: list[str] = []
        self.headers: list[str] = []

    async def chat(self, request: web.Request) -> web.Response:
        asked = await self._asked(request)
        reply = self._model(asked["model"], asked["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": None}
        if isinstance(reply, str):
            message["content"] = reply
        else:
            function = {"name": reply[0], "arguments": json.dumps(reply[1])}
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        reason = "stop" if isinstance(reply, str) else "tool_calls"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        named = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1}
        return web.json_response(
            {**named, "model": asked["model"], "choices": [choice], "usage": usage}
        )

    async def responses(self, request: web.Request) -> web.Response:
        asked = await self._asked(request)
        reply = self._model(asked["model"], asked["input"])
        if isinstance(reply, str):
            text = {"type": "output_text", "text": reply, "annotations": []}
            item = {"type": "message", "role": "assistant", "content": [text]}
        else:
            function = {"name": reply[0], "arguments": json.dumps(reply[1])}
            item = {"type": "function_call", "call_id": "call_1", **function}
        named = {"id": "resp_1", "object": "response", "created_at": 1, "status": "completed"}
        settings = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        output = [{"id": "item_1", "status": "completed", **item}]
        return web.json_response({**named, **settings, "model": asked["model"], "output": output})

    async def _asked(self, request: web.Request) -> dict[str, Any]:
        self.paths.append(request.path)
        self.headers += [name.lower() for name in request.headers]
        asked: dict[str, Any] = await request.json()
        return asked


@asynccontextmanager
async def plain_server(model: Model) -> AsyncIterator[PlainServer]:
    """Serve `model` until the block is left."""
    server = PlainServer(model)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_post("/v1/responses", server.responses)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
