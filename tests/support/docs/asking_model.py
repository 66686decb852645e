"""Answer as a model that asks for two tools at once, and for none once it has their results."""

import json
from typing import Any
from uuid import uuid4

from aiohttp import web

from tests.support.recordings import recordings
from tests.support.servers.fake_upstream import FakeUpstream, echo, whole_reply

CITIES = ("Oslo", "Lima")
STATED = ("function_call_output", "tool")


def ask_for_two_tools(upstream: FakeUpstream) -> None:
    """Have the upstream answer chat completions and responses in this way."""

    async def chat(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if asked.get("stream"):
            return await upstream.stream(request, asked)
        reply = whole_reply(asked, len(upstream.requests))
        # pydantic-ai looks at all of a reply.
        reply |= {"object": "chat.completion", "created": 1}
        reply["usage"] |= {"prompt_tokens": 3, "total_tokens": 5}
        if _wants_tools(asked, asked["messages"]):
            name = asked["tools"][0]["function"]["name"]
            calls = [
                {"id": tool_id, "type": "function", "function": {"name": name, "arguments": said}}
                for tool_id, said in _arguments()
            ]
            [choice] = reply["choices"]
            choice["message"] |= {"content": None, "tool_calls": calls}
            choice["finish_reason"] = "tool_calls"
        return web.json_response(reply)

    upstream.behave = chat
    upstream.behave_otherwise = responses


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer a response as a real vLLM did, in two tools' calls or in its text; echo all else."""
    if request.path != "/v1/responses":
        return await echo(request)
    asked = await request.json()
    wants = _wants_tools(asked, asked["input"])
    recorded = recordings("responses")[f"responses_{'tool' if wants else 'text'}_whole"]
    reply = json.loads(recorded["upstream"]) | {"id": f"resp_{uuid4().hex}"}
    if wants:
        [call] = reply["output"]
        own = {"name": asked["tools"][0]["name"]}
        reply["output"] = [
            call | own | {"id": f"fc_{tool_id}", "call_id": tool_id, "arguments": said}
            for tool_id, said in _arguments()
        ]
    return web.json_response(reply)


def _wants_tools(asked: dict[str, Any], turns: Any) -> bool:
    said = turns[-1] if isinstance(turns, list) else {}
    return bool(asked.get("tools")) and not {said.get("type"), said.get("role")} & set(STATED)


def _arguments() -> list[tuple[str, str]]:
    return [(f"chatcmpl-tool-{uuid4().hex}", json.dumps({"city": city})) for city in CITIES]
