"""System messages between turns go where the server's chat template shows them, and only there."""

import json
from collections import Counter
from typing import Any

import pytest
from aiohttp import web

from proxy.upstreams import server
from tests.integration.conftest import Proxy
from tests.support.servers.fake_upstream import FakeUpstream, whole_reply

ASKS = {"role": "user", "content": "q"}
HURRY = {"role": "system", "content": "Hurry."}
SYSTEM = {"role": "system", "content": "Be brief."}
KEPT = [SYSTEM, ASKS, HURRY]
JOINED = [
    SYSTEM,
    {"role": "user", "content": "q\n\n<system-reminder>\nHurry.\n</system-reminder>"},
]


class Template:
    """Answers `/tokenize` as a server with a chat template of some kind would, and chats too."""

    def __init__(self, upstream: FakeUpstream, kind: str) -> None:
        self.upstream = upstream
        self.kind = kind
        self.asked: Counter[str] = Counter()
        upstream.behave, upstream.behave_otherwise = self.chat, self.otherwise

    def prompt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The messages in the order in which the model sees them; None: the template raises."""
        first, later = messages[:1], messages[1:]
        inline = [one for one in later if one["role"] == "system"]
        turns = [one for one in later if one["role"] != "system"]
        match self.kind:
            case "keeps":
                return messages
            case "drops":
                return [*first, *turns]
            case "moves":
                return [*first, *inline, *turns]
        return None if inline else messages

    async def otherwise(self, request: web.Request) -> web.Response:
        self.asked[request.path] += 1
        if self.kind == "is hidden" or request.path != "/tokenize":
            return web.Response(status=404)
        asked = await request.json()
        assert asked["model"] == "m"
        assert asked["add_generation_prompt"] is False
        prompt = self.prompt(asked["messages"])
        if prompt is None:
            return web.json_response({"error": {"message": "must be first"}}, status=400)
        # A token for each character, behind one for the tools.
        text = "".join(one["role"] + one["content"] for one in prompt)
        return web.json_response({"tokens": [len(asked.get("tools") or ()), *map(ord, text)]})

    async def chat(self, _: web.Request) -> web.Response:
        asked = self.upstream.requests[-1]
        if self.prompt(asked["messages"]) is None:
            return web.json_response({"error": {"message": "must be first"}}, status=400)
        return web.json_response(whole_reply(asked, len(self.upstream.requests)))


async def say(proxy: Proxy, *messages: Any) -> None:
    body = {"model": "m", "max_tokens": 9, "system": "Be brief.", "messages": messages}
    reply = await proxy.ask("POST", "/v1/messages", **body)
    assert reply.status == 200


@pytest.mark.parametrize(
    ("kind", "said"),
    [("keeps", KEPT), ("drops", JOINED), ("moves", JOINED), ("raises", JOINED)],
)
async def test_system_message_between_turns_is_in_the_prompt_once_and_the_call_trainable(
    proxy: Proxy, upstream: FakeUpstream, kind: str, said: list[Any]
) -> None:
    template = Template(upstream, kind)
    await say(proxy, ASKS, HURRY)
    [asked] = upstream.requests
    assert asked["messages"] == template.prompt(asked["messages"]) == said
    assert set(template.asked) == {"/tokenize"}
    call = await proxy.only_call()
    assert (call.trainable, call.reason) == (True, None)
    # The record is of what the client sent.
    assert json.loads(call.request or b"")["messages"] == [ASKS, HURRY]


async def test_server_with_a_hidden_chat_template_gets_the_system_message_within_a_turn(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    Template(upstream, "is hidden")
    await say(proxy, ASKS, HURRY)
    assert upstream.requests[0]["messages"] == JOINED


async def test_chat_template_is_looked_up_by_the_first_call_that_needs_it(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    template = Template(upstream, "keeps")
    await say(proxy, ASKS)
    assert not template.asked
    await say(proxy, ASKS, HURRY)
    asked = template.asked.copy()
    await say(proxy, ASKS, HURRY)
    assert template.asked == asked == {"/tokenize": 4}


async def test_restarted_model_server_is_asked_again_for_its_chat_template(
    proxy: Proxy, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "TEMPLATE_S", 0.0)
    template = Template(upstream, "keeps")
    await say(proxy, ASKS, HURRY)
    for template.kind in ("drops", "is hidden", "keeps"):
        await say(proxy, ASKS, HURRY)
    assert [one["messages"] for one in upstream.requests] == [KEPT, JOINED, JOINED, KEPT]


async def test_system_messages_between_turns_of_a_clients_own_chat_stay_unchanged(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    template = Template(upstream, "drops")
    assert (await proxy.chat(messages=KEPT)).status == 200
    assert upstream.requests[0]["messages"] == KEPT
    assert not template.asked
