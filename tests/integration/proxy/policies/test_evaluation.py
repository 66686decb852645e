"""Evaluation through the proxy: how a call says it, and which version it may ask for."""

import json
from typing import Any

import pytest
from aiohttp import web

from proxy.calls import call as steps
from tests.integration.conftest import Proxy
from tests.support.ledger.lineage import State, set_state, trained
from tests.support.servers.fake_upstream import FakeUpstream, whole_reply
from tests.support.waiting import eventually


async def splits(proxy: Proxy, calls: int) -> set[tuple[str, str]]:
    return {(episode.key, episode.split) for episode in await proxy.episodes(calls)}


async def test_header_url_task_or_metadata_makes_an_episode_evaluation(proxy: Proxy) -> None:
    await proxy.chat("/episode/header", {"x-pawl-split": "eval"})
    await proxy.chat("/episode/url/split/eval")
    await proxy.chat("/task/eval%2Fsums/episode/task")
    await proxy.chat("/episode/metadata", metadata={"pawl_split": "eval"})
    await proxy.chat("/episode/none")
    assert await splits(proxy, 5) == {
        ("header", "eval"),
        ("url", "eval"),
        ("task", "eval"),
        ("metadata", "eval"),
        ("none", "train"),
    }


async def test_call_that_fails_while_its_body_is_read_keeps_the_split_of_its_url(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(steps, "read_request", failing)
    assert (await proxy.chat("/split/eval")).status == 500
    assert {split for _, split in await splits(proxy, 1)} == {"eval"}


# Versions


def serving(*names: str) -> Any:
    """A model server that has these models, and says of others what vLLM says."""

    async def handle(request: web.Request) -> web.Response:
        asked = json.loads(await request.read())
        if asked["model"] in names:
            return web.json_response(whole_reply(asked, 1))
        error = {"message": f"The model `{asked['model']}` does not exist.", "code": 404}
        return web.json_response({"error": error}, status=404)

    return handle


@pytest.fixture
async def versions(proxy: Proxy) -> None:
    """Version 1 is unloaded, 2 rejected, 3 retired; the base still serves."""
    async with proxy.engine.begin() as connection:
        await trained(connection, 0, 1, 2)
        states: tuple[State, ...] = ("unloaded", "rejected", "retired")
        for version, state in enumerate(states, 1):
            await set_state(connection, "m", version, state, reason="test", actor="operator")

    async def known() -> bool:
        return (await proxy.chat(model="m@3")).headers.get("x-pawl-policy") == "m@3"

    await eventually(known)


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize(("asked", "served"), [("m@0", "m"), ("m@1", "m@1"), ("m@3", "m@3")])
async def test_version_asked_for_by_name_is_served_while_the_server_has_it(
    proxy: Proxy, upstream: FakeUpstream, asked: str, served: str
) -> None:
    upstream.behave = serving("m", "m@1", "m@3")
    reply = await proxy.chat("/episode/e/split/eval", model=asked)
    assert (reply.status, reply.headers["x-pawl-policy"]) == (200, asked)
    assert upstream.requests[-1]["model"] == served

    episodes = await proxy.episodes(1, lambda found: any(e.key == "e" for e in found))
    [call] = next(e.calls for e in episodes if e.key == "e")
    assert (call.policy, call.policy_version, call.trainable) == ("m", int(asked[-1]), True)


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize(
    ("asked", "why"),
    [("m@1", "is retired"), ("m@2", "was rejected"), ("m@9", "is unknown")],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_unserved_version_is_404_with_the_reason_and_the_served_versions(
    proxy: Proxy, upstream: FakeUpstream, asked: str, why: str, stream: bool
) -> None:
    upstream.behave = serving("m", "m@3")
    reply = await proxy.chat("/episode/e/split/eval", model=asked, stream=stream)
    error = reply.json["error"]
    assert (reply.status, reply.headers["x-pawl-fault"]) == (404, "client")
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert f"does not have {asked}: this version {why}" in error["message"]
    assert "m@3, m@0" in error["message"]


@pytest.mark.usefixtures("versions")
async def test_unknown_model_gets_the_upstreams_own_error(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    upstream.behave = serving("m")
    reply = await proxy.chat(model="gpt-9")
    assert (reply.status, reply.headers["x-pawl-fault"]) == (404, "upstream")
    assert reply.json["error"]["message"] == "The model `gpt-9` does not exist."
