"""Tenants at one proxy use the same names and texts, and none touches another's data."""

import asyncio
import random
from typing import Any

import pytest
from aiohttp import web

from store.records import Episode
from store.tenants import DEFAULT, bare
from tests.integration.conftest import Proxy
from tests.integration.proxy.keys.conftest import EVERYONE, Headers, by_tenant
from tests.support.servers.fake_upstream import FakeUpstream, answers, whole_reply


async def test_equal_episode_task_and_agent_names_of_three_tenants_stay_apart(
    shared: Proxy, keys: Headers
) -> None:
    named = {"x-pawl-episode": "run-7", "x-pawl-task": "t", "x-pawl-agent": "writer"}
    replies = {}
    for tenant, key in keys.items():
        replies[tenant] = await shared.chat(headers={**key, **named})
        assert replies[tenant].headers["x-pawl-episode"] == "run-7"
    policies = {one: reply.headers["x-pawl-policy"] for one, reply in replies.items()}
    assert policies == {"a": "a-writes@0", "b": "b-writes@0", DEFAULT: "m@0"}
    found = by_tenant(await shared.episodes(3))
    for tenant, [episode] in found.items():
        assert (bare(episode.key), bare(episode.task or "")) == ("run-7", "t")
        assert [call.policy for call in episode.calls] == [policies[tenant].partition("@")[0]]

    async def state(tenant: str, **statement: Any) -> str:
        said = await shared.feedback({"value": 1.0, **statement}, **keys[tenant])
        assert said[0] in (200, 202)
        return str(said[1]["results"][0]["status"])

    call, response = replies["a"].headers["x-pawl-call"], replies["a"].json["id"]
    for target in ({"call": call}, {"response": response}, {"episode": "a\x1frun-7"}):
        said = {tenant: await state(tenant, **target) for tenant in EVERYONE}
        own = "pending" if "episode" in target else "stored"
        assert said == {"a": own, "b": "pending", DEFAULT: "pending"}
    assert await state("b", episode="run-7") == "stored"

    def counts(found: list[Episode]) -> dict[str, int]:
        own = by_tenant(found)
        return {one: len(e.feedback) + len(e.calls[0].feedback) for one, [e] in own.items()}

    scored = await shared.episodes(3, lambda found: sum(counts(found).values()) >= 3)
    assert counts(scored) == {"a": 2, "b": 1, DEFAULT: 0}


async def test_tenants_share_no_idempotency_keys(shared: Proxy, keys: Headers) -> None:
    for value, tenant in enumerate(EVERYONE):
        body = {"value": value, "episode": "run-7"}
        for _ in range(2):
            said = await shared.feedback(body, **{"Idempotency-Key": "k", **keys[tenant]})
            assert said[0] == 202
        status, refusal = await shared.feedback(
            {**body, "value": 9}, **{"Idempotency-Key": "k", **keys[tenant]}
        )
        assert status == 409
        assert "Idempotency-Key 'k' was" in refusal["error"]["message"]


def tool_of(turn: int, seed: int) -> dict[str, Any]:
    """A tool call: under a counter, or an id that looks as if it was handed out only once."""
    function = {"name": "calc", "arguments": "{}"}
    return {"id": f"call_{'a1b2c3d4' * seed}{turn}", "type": "function", "function": function}


def steps(seed: int) -> list[dict[str, Any]]:
    """Bodies of a conversation with a tool, the same for every tenant."""
    talk: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    bodies = []
    for turn in range(3):
        bodies.append({"model": "m", "messages": list(talk)})
        tool = tool_of(turn, seed)
        talk.append({"role": "assistant", "content": None, "tool_calls": [tool]})
        talk.append({"role": "tool", "tool_call_id": tool["id"], "content": "4"})
    return bodies


@pytest.mark.parametrize("seed", range(3))
async def test_no_call_joins_another_tenants_episode(
    seed: int, shared: Proxy, keys: Headers, upstream: FakeUpstream
) -> None:
    dice = random.Random(seed)

    async def script(_: web.Request) -> web.Response:
        asked = upstream.requests[-1]
        turn = len(asked["messages"]) // 2
        reply = whole_reply(asked, 0) | {"id": f"chatcmpl-{turn}"}
        reply["choices"][0]["message"] |= {"content": None, "tool_calls": [tool_of(turn, seed)]}
        return web.json_response(reply)

    upstream.behave = script
    waiting = {tenant: steps(seed) for tenant in EVERYONE}
    while any(waiting.values()):
        tenant = dice.choice([one for one, left in waiting.items() if left])
        body = waiting[tenant].pop(0)
        retry = {"x-stainless-retry-count": "1"} if dice.random() < 0.5 else {}
        assert (await shared.chat(headers={**keys[tenant], **retry}, **body)).status == 200

    joined = await shared.episodes(9, lambda found: len(found) == 3)
    for tenant, episodes in by_tenant(joined).items():
        [episode] = episodes
        assert len(episode.calls) == 3, tenant
        assert episode.quarantined_reason is None


async def test_repeat_of_another_tenants_failed_attempt_is_no_retry(
    shared: Proxy, keys: Headers, upstream: FakeUpstream
) -> None:
    upstream.behave = answers({}, 500)
    assert (await shared.chat(headers=keys["a"])).status == 500
    upstream.behave = None
    retry = {"x-stainless-retry-count": "1"}
    for tenant in ("b", DEFAULT, "a"):
        assert (await shared.chat(headers={**keys[tenant], **retry})).status == 200

    def methods(found: list[Episode]) -> dict[str, list[str]]:
        own = by_tenant(found)
        return {one: [call.method for e in own[one] for call in e.calls] for one in EVERYONE}

    # Until its repeat is stored, a failed attempt counts as a call.
    found = await shared.episodes(3, lambda found: methods(found)["a"] != ["own"])
    assert methods(found) == {"a": ["retry"], "b": ["own"], DEFAULT: ["own"]}


async def test_policy_answers_only_its_tenant(
    shared: Proxy, keys: Headers, upstream: FakeUpstream
) -> None:
    for tenant, policy in (("a", "a-writes"), ("b", "b-writes")):
        for asked in ("writes", policy, f"{policy}@1"):
            reply = await shared.chat(headers=keys[tenant], model=asked)
            assert reply.headers["x-pawl-policy"].partition("@")[0] == policy
    # To the others its name is that of a model that Pawl does not know.
    for tenant, foreign in (("a", "b-writes"), (DEFAULT, "a-writes"), ("b", "m")):
        reply = await shared.chat(headers=keys[tenant], model=foreign)
        assert "x-pawl-policy" not in reply.headers
        assert upstream.requests[-1]["model"] == foreign


async def test_list_of_models_leaves_out_policies_of_other_tenants(
    shared: Proxy, keys: Headers
) -> None:
    listed, serving = {}, {}
    for tenant, key in keys.items():
        reply = await shared.ask("GET", "/v1/models", key)
        listed[tenant] = [model["id"] for model in reply.json["data"]]
        serving[tenant] = reply.headers["x-pawl-policy"]
    assert serving == {"a": "a-writes@0", "b": "b-writes@0", DEFAULT: "m@0"}
    assert listed == {
        "a": ["m", "a-writes@1", "a-writes", "writes"],
        "b": ["m", "b-writes@1", "b-writes", "writes"],
        DEFAULT: ["m", "m@1"],
    }


async def test_tenants_metrics_page_shows_only_its_own_policies(
    shared: Proxy, keys: Headers
) -> None:
    for key in keys.values():
        assert (await shared.chat(headers={**key, "x-pawl-agent": "writer"})).status == 200
    pages = {
        tenant: (await shared.admin_page("/metrics", key)).body.decode()
        for tenant, key in keys.items()
    }
    samples = [line for line in pages["a"].splitlines() if not line.startswith("#")]
    assert any(line.startswith("pawl_calls_total{") for line in samples)
    assert all('policy="a-writes"' in line for line in samples)
    assert "b-writes" not in pages["a"]
    # The proxy is the default tenant's.
    assert all(one in pages[DEFAULT] for one in ("a-writes", "b-writes", "pawl_records_total"))
    assert (await shared.admin_page("/readyz")).json["serving"] == {"m": 0}


async def test_concurrent_calls_of_tenants_with_equal_episode_names_stay_apart(
    shared: Proxy, keys: Headers
) -> None:
    async def one(number: int) -> None:
        tenant = EVERYONE[number % 3]
        named = {"x-pawl-episode": f"e{number % 4}"}
        reply = await shared.chat(headers={**keys[tenant], **named})
        assert reply.status == 200

    await asyncio.gather(*[one(number) for number in range(48)])
    found = by_tenant(await shared.episodes(48))
    for tenant, episodes in found.items():
        assert {bare(one.key) for one in episodes} == {"e0", "e1", "e2", "e3"}, tenant
        assert sum(len(one.calls) for one in episodes) == 16
