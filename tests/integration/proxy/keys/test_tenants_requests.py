"""Whatever a tenant's request names, it reaches no version, file or response of another's."""

import json
from typing import Any

import pytest
from aiohttp import web

from proxy import tenants
from store.records import Episode
from store.tenants import DEFAULT
from tests.integration.conftest import Proxy, Reply
from tests.integration.proxy.keys.conftest import EVERYONE, Headers, about, by_tenant
from tests.support.proxy.keys import CODEX, SECOND_TURN
from tests.support.servers.fake_upstream import FakeUpstream, answers, whole_reply

RESPONSE = {"id": "resp_1", "object": "response", "output": []}


@pytest.fixture
def looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups take place once, and wait for a slow machine."""
    monkeypatch.setattr(tenants, "STORED_RESPONSE_WAIT_S", 0.0)
    monkeypatch.setattr(tenants, "STORED_RESPONSE_LOOKUP_S", 60.0)


async def test_another_tenants_version_looks_like_an_unknown_version(
    shared: Proxy, keys: Headers, upstream: FakeUpstream
) -> None:
    calls = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
    for tenant, foreign in (("a", "b-writes@1"), ("b", "m@1"), (DEFAULT, "a-writes@1")):
        for path in (*calls, "/v1/embeddings", "/tokenize"):
            body = {"messages": [{"role": "user", "content": "q"}], "input": "q", "prompt": "q"}
            answers = {
                name: await shared.ask("POST", path, keys[tenant], model=name, **body)
                for name in (foreign, "nobody@1", "a-writes@7" if tenant != "a" else "m@7")
            }
            assert len({about(reply, name) for name, reply in answers.items()}) == 1, path
            assert {reply.status for reply in answers.values()} == {404}
        shown = [
            about(await shared.ask("GET", f"/v1/models/{name}", keys[tenant]), name)
            for name in (foreign, "nobody@1")
        ]
        assert shown[0] == shown[1]
        assert shown[0][0] == 404
    assert (upstream.requests, upstream.other) == ([], [])


def form(name: bytes, value: bytes, charset: str = "") -> tuple[dict[str, str], bytes]:
    """The header and body of a form with a field and a file."""
    head = {"Content-Type": f"multipart/form-data; boundary=x{charset}"}
    field = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name, value)
    file = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n\xff\x00'
    return head, field + file + b"\r\n--x--"


async def test_another_tenants_version_named_in_a_form_is_refused_too(
    shared: Proxy, keys: Headers, upstream: FakeUpstream
) -> None:
    async def post(*told: Any) -> Reply:
        head, data = form(b"model", *told)
        return await shared.ask("POST", "/v1/audio/transcriptions", keys["a"] | head, data=data)

    seen = {name: (await post(name)).status for name in (b"b-writes@1", b"a-writes@1", b"m")}
    assert seen == {b"b-writes@1": 404, b"a-writes@1": 200, b"m": 200}
    # vLLM reads a form in the character set that its head names.
    reply = await post(b"b-writes+AEA-1", "; charset=utf-7")
    assert reply.status == 400
    assert b"in another character set than UTF-8" in reply.body
    assert len(upstream.other) == 2


async def test_only_the_default_tenant_may_refer_to_a_providers_file_in_a_form(
    shared: Proxy, keys: Headers, upstream: FakeUpstream
) -> None:
    head, data = form(b"mask[file_id]", b"file-1")
    for tenant, key in keys.items():
        reply = await shared.ask("POST", "/v1/images/edits", {**key, **head}, data=data)
        assert reply.status == (200 if tenant == DEFAULT else 400)
        assert (b"mask.file_id is not among" in reply.body) is (tenant != DEFAULT)
    assert len(upstream.other) == 1


async def test_unreadable_body_of_a_tenant_is_refused_as_it_may_name_anothers_version(
    shared: Proxy, keys: Headers, upstream: FakeUpstream
) -> None:
    said = '{"model": "b-writes@1", "messages": [], "input": "q"}'
    deep = '{"model": "b-writes@1", "messages": ' + "[" * 600 + "]" * 600 + "}"
    bodies = [said.encode("utf-16"), said.encode("utf-32"), deep.encode(), b"model=b-writes%401"]
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/embeddings"):
        for body in bodies:
            assert (await shared.ask("POST", path, keys["a"], data=body)).status == 400
    assert (upstream.requests, upstream.other) == ([], [])


async def test_only_the_default_tenant_reaches_the_providers_storage(
    shared: Proxy, keys: Headers
) -> None:
    for path in ("/v1/files", "/v1/files/f1", "/v1/responses/r1", "/v1/chat/completions/c1"):
        seen = {one: (await shared.ask("GET", path, key)).status for one, key in keys.items()}
        assert seen == {"a": 403, "b": 403, DEFAULT: 200}
    # A session beside the proxy would reach it all.
    path, session = "/v1/realtime/client_secrets", {"session": {"type": "realtime"}}
    seen = {one: (await shared.ask("POST", path, k, **session)).status for one, k in keys.items()}
    assert seen == {"a": 403, "b": 403, DEFAULT: 200}


async def test_call_continues_only_responses_of_its_own_tenant(
    shared: Proxy, keys: Headers, upstream: FakeUpstream, looked_up_once: None
) -> None:
    upstream.behave_otherwise = answers(RESPONSE)

    async def go_on(tenant: str, **body: Any) -> Reply:
        said = {"model": "m", "input": "q", **body}
        return await shared.ask("POST", "/v1/responses", keys[tenant], **said)

    assert (await go_on("a")).status == 200
    replies = {one: await go_on(one, previous_response_id="resp_1") for one in EVERYONE}
    # The default tenant's account may keep responses that no proxy has seen, but this is another's.
    assert {one: reply.status for one, reply in replies.items()} == {
        "a": 200,
        "b": 404,
        DEFAULT: 404,
    }
    hidden = await go_on(DEFAULT, extra_body={"previous_response_id": "resp_1"})
    assert hidden.status == 404
    assert (await go_on(DEFAULT, previous_response_id="resp_of_no_proxy")).status == 200
    unknown = await go_on("b", previous_response_id="resp_0")
    assert about(unknown, "resp_0") == about(replies["b"], "resp_1")
    assert (await go_on("b", conversation="conv_1")).status == 400
    extra = {"previous_response_id": "resp_1", "conversation": "conv_1", "request_id": "resp_1"}
    for name, value in extra.items():
        assert (await go_on("b", extra_body={name: value})).status == 400
    # vLLM would give its response another one's id, which the tenant could then go on from.
    for name in ("request_id", "rid"):
        chosen = await go_on("b", **{name: "resp_1"}, store=False)
        assert (chosen.status, chosen.json["error"]["param"]) == (400, name)
    assert (await go_on("b", previous_response_id="resp_1")).status == 404
    for named in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}):
        items = [named, {"role": "user", "content": "q"}]
        assert (await go_on("b", input=items)).status == 400
        assert (await go_on("b", extra_body={"input": items})).status == 400
    assert len(upstream.other) == 3


async def test_reply_id_chosen_by_a_chat_client_gives_no_access_to_a_response(
    shared: Proxy, keys: Headers, upstream: FakeUpstream, looked_up_once: None
) -> None:
    async def chat(_: web.Request) -> web.Response:
        # SGLang's reply has the id that its request's `rid` says.
        asked = upstream.requests[-1]
        return web.json_response(whole_reply(asked, 0) | {"id": asked["rid"]})

    upstream.behave_otherwise, upstream.behave = answers(RESPONSE), chat
    own = await shared.ask("POST", "/v1/responses", keys["a"], model="m", input="q")
    assert own.json["id"] == "resp_1"
    # Of the tenants the default one alone chooses ids.
    assert (await shared.chat(headers=keys["b"], rid="resp_1")).status == 400
    reply = await shared.chat(headers=keys[DEFAULT], rid="resp_1")
    assert reply.json["id"] == "resp_1"
    found = by_tenant(await shared.episodes(3))
    said = {"model": "m", "input": "q", "previous_response_id": "resp_1"}
    seen = {one: await shared.ask("POST", "/v1/responses", keys[one], **said) for one in EVERYONE}
    assert {one: got.status for one, got in seen.items()} == {"a": 200, "b": 404, DEFAULT: 404}
    # A reward for it is one for what its tenant got under this name, and for nothing else.
    status, _ = await shared.feedback({"value": 1.0, "response": "resp_1"}, **keys[DEFAULT])
    assert status == 200

    def scored(found: list[Episode]) -> list[str]:
        return [e.key for e in found if e.feedback or any(call.feedback for call in e.calls)]

    assert scored(await shared.episodes(3, scored)) == [found[DEFAULT][0].key]


async def test_odd_response_id_does_not_block_later_lookups(
    shared: Proxy, keys: Headers, looked_up_once: None
) -> None:
    # After a failed look-up nobody is answered for a second: the next one would be 503.
    for odd in ("\x00", "resp_0", "resp\x00_1", "x" * 100_000, "\x1f", "resp_0"):
        said = {"model": "m", "input": "q", "previous_response_id": odd}
        tenant = "a" if odd == "resp_0" else "b"
        reply = await shared.ask("POST", "/v1/responses", keys[tenant], **said)
        assert reply.status == 404, odd


async def test_fields_and_headers_by_which_a_tenant_could_steer_routing_reach_no_upstream(
    shared: Proxy, keys: Headers, upstream: FakeUpstream
) -> None:
    steering: list[dict[str, Any]] = [
        {"fallbacks": ["b-writes@1"]},
        {"models": ["m", "b-writes@1"]},
        {"api_base": "http://evil.example/v1"},
        {"extra_body": {"api_key": "k"}},
        {"priority": -1},
        {"cache_salt": "b"},
        {"request_id": "resp_1"},
    ]
    paths = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
    for path in paths:
        for fields in steering:
            body = {"model": "m", "messages": [], "input": "q", **fields}
            reply = await shared.ask("POST", path, keys["a"], **body)
            assert reply.status in (400, 404), (path, fields)
            assert reply.headers["x-pawl-fault"] == "client"
        twice = '{"model": "b-writes@1", "messages": [], "input": "q", "mod\\u0065l": "m"}'
        reply = await shared.ask("POST", path, keys["a"], data=twice)
        assert reply.status == 400
        assert b"twice" in reply.body
    assert (upstream.requests, upstream.other) == ([], [])
    head = {"x-gateway-model-name-rewrite": "b-writes@1", "x-request-id": "r"}
    assert (await shared.chat(headers={**keys["a"], **head})).status == 200
    assert not {"x-gateway-model-name-rewrite", "x-request-id"} & {
        name.lower() for name in upstream.headers[-1]
    }
    assert (await shared.chat(headers={**keys[DEFAULT], **head})).status == 404


async def test_new_fields_of_clients_fail_no_call_and_are_recorded(
    shared: Proxy, keys: Headers, upstream: FakeUpstream
) -> None:
    upstream.behave_otherwise = answers(RESPONSE)
    reply = await shared.ask("POST", "/v1/responses", keys["a"], model="m", **CODEX)
    assert reply.status == 200
    assert reply.headers["x-pawl-warning"].endswith("another tenant's object: 'client_metadata'")
    [(_, _, sent)] = upstream.other
    # The proxy adds to `include`.
    said = CODEX.keys() - {"client_metadata", "include"}
    assert {name: json.loads(sent)[name] for name in said} == {name: CODEX[name] for name in said}
    assert b"client_metadata" not in sent
    reply = await shared.chat(headers=keys["a"], **SECOND_TURN)
    assert (reply.status, "x-pawl-warning" in reply.headers) == (200, False)
    assert upstream.requests[-1]["messages"] == SECOND_TURN["messages"]
    reply = await shared.ask("POST", "/v1/embeddings", keys["a"], model="m", input="q", new=1)
    assert reply.status == 200
    assert "'new'" in reply.headers["x-pawl-warning"]
    calls = [call for episode in await shared.episodes(2) for call in episode.calls]
    assert any(b"client_metadata" in (call.request or b"") for call in calls)


FILE = {"type": "file", "file": {"file_id": "file-1"}}
NAMING_FILES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": [FILE]}]},
    "/v1/completions": {"prompt": "q", "kv_transfer_params": {"do_remote_prefill": True}},
    "/v1/responses": {"input": [{"role": "user", "content": [FILE["file"]]}]},
    "/v1/messages": {"messages": [], "container": "container_1"},
    "/v1/embeddings": {"input": "q", "messages": [{"role": "user", "content": [FILE]}]},
    "/v1/images/edits": {"prompt": "q", "images": [{"file_id": "file-1"}]},
}


@pytest.mark.parametrize("path", NAMING_FILES)
async def test_only_the_default_tenant_may_refer_to_a_providers_file_in_a_request(
    path: str, shared: Proxy, keys: Headers, upstream: FakeUpstream
) -> None:
    body = {"model": "m", **NAMING_FILES[path]}
    seen = {one: await shared.ask("POST", path, key, **body) for one, key in keys.items()}
    assert {one: reply.status for one, reply in seen.items()} == {"a": 400, "b": 400, DEFAULT: 200}
    assert seen["a"].headers["x-pawl-fault"] == "client"
    assert b"is not among the fields that tenants may send" in seen["a"].body
    assert len(upstream.requests) + len(upstream.other) == 1
