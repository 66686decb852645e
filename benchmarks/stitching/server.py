"""Script the server of `benchmarks.stitching`: three APIs that answer by a plan.

Which episode a request is of stands in its URL (`/e/7/v1/…`), so that what identity makes of
the request can be held against the truth; identity never sees it.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import msgspec
from aiohttp import web

from benchmarks.stitching.plans import Plan, Reply


class Exchange(msgspec.Struct, frozen=True):
    """Hold a request as a client sent it, and what it got."""

    dialect: str
    headers: dict[str, str]
    body: dict[str, Any]
    status: int
    reply: dict[str, Any]


class Server:
    """Answer each episode's requests by its plan, and keep the exchanges."""

    def __init__(self, plans: list[Plan]) -> None:
        self._left = [list(plan.replies) for plan in plans]
        self.exchanges: list[list[Exchange]] = [[] for _ in plans]

    async def handle(self, request: web.Request) -> web.Response:
        """Answer any POST."""
        number = int(request.match_info["number"])
        dialect, answer = _APIS[request.match_info["path"]]
        body = await request.json()
        left = self._left[number]
        if left[0].attempts:
            left[0] = msgspec.structs.replace(left[0], attempts=left[0].attempts - 1)
            status, reply = 503, {"error": {"message": "busy", "type": "overloaded_error"}}
        else:
            status, reply = 200, answer(left.pop(0), body)
        headers = {
            name.lower(): value
            for name, value in request.headers.items()
            if name.lower() not in ("authorization", "x-api-key", "host", "content-length")
        }
        self.exchanges[number].append(Exchange(dialect, headers, body, status, reply))
        return web.json_response(reply, status=status, headers={"retry-after-ms": "1"})


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    """Yield the server's address while it runs."""
    app = web.Application()
    app.router.add_post("/e/{number}/{path:.+}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def _chat(reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in reply.calls
    ]
    message = {
        "role": "assistant",
        "content": reply.text or None,
        "refusal": None,
        "tool_calls": calls,
        "reasoning": None,
    }
    return {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": "tool_calls" if calls else "stop",
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def _response(reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": 1,
        "model": body["model"],
        "status": "completed",
        "output": _items(reply),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools", []),
        "usage": {
            "input_tokens": 1,
            "output_tokens": 1,
            "total_tokens": 2,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _items(reply: Reply) -> list[dict[str, Any]]:
    """Return what a response holds: a thought, the text if there is one, and the tool calls."""
    thought = {"type": "reasoning_text", "text": "Hm."}
    items: list[dict[str, Any]] = [
        {"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": [], "content": [thought]}
    ]
    if reply.text:
        text: dict[str, Any] = {
            "type": "output_text",
            "text": reply.text,
            "annotations": [],
            "logprobs": None,
        }
        items.append(
            {
                "id": f"msg_{uuid4().hex}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
        )
    items += [
        {
            "id": f"fc_{uuid4().hex}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": json.dumps(call.arguments),
        }
        for call in reply.calls
    ]
    return items


def _message(reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if reply.text:
        content.append({"type": "text", "text": reply.text})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in reply.calls
    ]
    return {
        "id": f"msg_{uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": content,
        "stop_reason": "tool_use" if reply.calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }


_APIS = {
    "v1/chat/completions": ("chat", _chat),
    "v1/responses": ("responses", _response),
    "v1/messages": ("messages", _message),
}
