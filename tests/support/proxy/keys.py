"""Make API keys, show them, and wait until a proxy knows them."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from store.grants import NO_LIMITS, Limits, Scope
from store.keys import create_key
from store.tenants import DEFAULT
from tests.integration.conftest import Proxy
from tests.support.waiting import eventually

CALL = {"model": "m", "messages": [{"role": "user", "content": "q"}]}

# As Codex 0.171 sends it: its tools stand in a namespace, and `client_metadata` is its own.
CODEX: dict[str, Any] = {
    "instructions": "You are Codex.",
    "input": [
        {
            "type": "message",
            "id": "msg_0199",
            "role": "user",
            "content": [{"type": "input_text", "text": "q"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": None,
        },
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_1",
            "name": "shell",
            "arguments": "{}",
            "call_id": "call_1",
        },
        {
            "type": "function_call_output",
            "id": "fco_0199",
            "call_id": "call_1",
            "output": "Process exited with code 0",
        },
    ],
    "tools": [
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}},
        {
            "type": "namespace",
            "name": "mcp__files",
            "description": "Files.",
            "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-session",
    "client_metadata": {"session_id": "0199-session", "thread_id": "0199-session"},
}
# As mini-swe-agent sends a reply back that it got through LiteLLM.
SECOND_TURN: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "q"},
        {
            "content": "I look.",
            "role": "assistant",
            "tool_calls": [
                {
                    "function": {"arguments": "{}", "name": "bash"},
                    "id": "call_1",
                    "type": "function",
                }
            ],
            "reasoning_content": "Hm.",
            "provider_specific_fields": {"reasoning": "Hm."},
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "x"},
    ],
    "temperature": 0.0,
}


async def made(
    engine: AsyncEngine,
    name: str,
    *scopes: Scope,
    limits: Limits = NO_LIMITS,
    tenant: str = DEFAULT,
) -> str:
    async with engine.begin() as connection:
        return (await create_key(connection, name, scopes, limits, tenant)).key


async def key_of(engine: AsyncEngine, tenant: str, *scopes: Scope) -> str:
    return await made(engine, f"{tenant}-{'-'.join(scopes)}", *scopes, tenant=tenant)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status(proxy: Proxy, path: str, headers: Mapping[str, str], port: str = "") -> int:
    """POST what the path takes, or GET from the admin port."""
    if port:
        return (await proxy.admin_page(path, headers)).status
    body: Any = {"value": 1, "episode": "e"} if path == "/feedback" else CALL
    return (await proxy.ask("POST", path, headers, **body)).status


async def taken(proxy: Proxy, key: str) -> None:
    """Wait until the proxy knows a key, on both ports."""

    async def known() -> bool:
        # A port that has not seen the key yet may still be open to everybody.
        seen, open_to_all = [
            [
                await status(proxy, "/v1/embeddings", headers),
                await status(proxy, "/metrics", headers, "admin"),
            ]
            for headers in (bearer(key), {})
        ]
        return 401 not in seen and open_to_all == [401, 401]

    await eventually(known)
