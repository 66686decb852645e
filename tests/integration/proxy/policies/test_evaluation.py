"""Evaluation through the proxy: how a call says it, and which version it may ask for."""

import json
from typing import Any

import pytest
from aiohttp import web
from sqlalchemy import text

from proxy.calls import call as steps
from tests.integration.conftest import Proxy
from tests.support.servers.fake_upstream import FakeUpstream, whole_reply
from tests.support.waiting import eventually

VERSION = """
    WITH made AS (
        INSERT INTO updates (id, policy, parent_version, version, state, recipe)
        VALUES (uuidv7(), 'm', CAST(:version AS integer) - 1, :version, 'done', '{}')
        RETURNING id)
    INSERT INTO policies (name, version, state, served_name, update_id)
    SELECT 'm', :version, :state, 'm@' || CAST(:version AS integer), id FROM made
"""


async def splits(proxy: Proxy, calls: int) -> set[tuple[str, str]]:
    return {(episode.key, episode.split) for episode in await proxy.episodes(calls)}


async def test_header_url_task_and_metadata_say_that_it_is_evaluation(proxy: Proxy) -> None:
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


async def test_an_unknown_split_is_a_warning_and_the_call_goes_through(proxy: Proxy) -> None:
    before = (await proxy.counters())["pawl_warnings_total"]
    reply = await proxy.chat("/episode/e", {"x-pawl-split": "test"})
    assert reply.status == 200
    assert "x-pawl-split 'test' is no split" in reply.headers["x-pawl-warning"]
    assert (await proxy.counters())["pawl_warnings_total"] == before + 1
    assert await splits(proxy, 1) == {("e", "train")}


async def test_a_call_whose_body_cannot_be_read_is_evaluation_too(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(steps, "read_request", failing)
    assert (await proxy.chat("/split/eval")).status == 500
    assert {split for _, split in await splits(proxy, 1)} == {"eval"}


async def test_what_is_asked_is_not_told_to_the_upstream(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    await proxy.chat("/split/eval", {"x-pawl-split": "eval"})
    assert not [name for name in upstream.headers[-1] if name.lower().startswith("x-pawl-")]


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
    """Version 1 is retired, 2 rejected, 3 published; the base still serves."""
    async with proxy.engine.begin() as connection:
        for version, state in ((1, "retired"), (2, "rejected"), (3, "published")):
            await connection.execute(text(VERSION), {"version": version, "state": state})

    async def known() -> bool:
        return (await proxy.chat(model="m@3")).headers.get("x-pawl-policy") == "m@3"

    await eventually(known)


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize(("asked", "served"), [("m@0", "m"), ("m@1", "m@1"), ("m@3", "m@3")])
async def test_a_version_is_served_by_its_name_also_a_retired_one_that_is_loaded(
    proxy: Proxy, upstream: FakeUpstream, asked: str, served: str
) -> None:
    upstream.behave = serving("m", "m@1", "m@3")
    reply = await proxy.chat("/episode/e/split/eval", model=asked)
    assert (reply.status, reply.headers["x-pawl-policy"]) == (200, asked)
    assert upstream.requests[-1]["model"] == served

    async def stored() -> list[tuple[str, int, bool]]:
        query = text(
            "SELECT t.policy, t.policy_version, t.trainable FROM transitions t"
            " JOIN episodes e ON e.id = t.episode_id WHERE e.key = 'e'"
        )
        async with proxy.engine.connect() as connection:
            return [tuple(row) for row in await connection.execute(query)]

    assert await eventually(stored) == [("m", int(asked[-1]), True)]


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize(
    ("asked", "why"),
    [("m@1", "is retired"), ("m@2", "was rejected"), ("m@9", "is unknown")],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_version_that_is_not_served_is_an_error_that_says_what_is(
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
async def test_another_unknown_model_is_the_upstreams_own_error(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    upstream.behave = serving("m")
    reply = await proxy.chat(model="gpt-9")
    assert (reply.status, reply.headers["x-pawl-fault"]) == (404, "upstream")
    assert reply.json["error"]["message"] == "The model `gpt-9` does not exist."
