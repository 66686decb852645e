"""Several upstreams: a request goes where its model is, and nowhere else."""

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.errors import BadUpstreams
from proxy.upstreams.upstreams import check_upstreams, open_upstreams
from store.version_states import ensure_base
from tests.conftest import ROOT
from tests.integration.conftest import Proxy, proxy_with, settings_for
from tests.support.ledger.lineage import promote
from tests.support.servers.fake_upstream import FakeUpstream, fake_upstream
from tests.support.waiting import PATIENCE_S, eventually

FILE = """
[[upstream]]
name = "local"
urls = ["{local}"]
models = ["m", "qwen*"]
{default}

[[upstream]]
name = "hosted"
urls = ["{hosted}"]
models = ["gpt-*", "text-embedding"]
api_key_env = "HOSTED_KEY"
"""


PUBLISHED = (
    "INSERT INTO updates (id, policy, parent_version, version, state, recipe)"
    " VALUES (uuidv7(), 'm', 0, 1, 'done', '{}')",
    "INSERT INTO policies (name, version, state, served_name, update_id)"
    " SELECT 'm', 1, 'published', 'm@1', id FROM updates",
)


@dataclass
class Setup:
    """A proxy before two servers; only the first is vLLM."""

    proxy: Proxy
    local: FakeUpstream
    hosted: FakeUpstream


@pytest.fixture(params=["default = true"])
async def setup(
    database_url: str,
    engine: AsyncEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Setup]:
    monkeypatch.setenv("HOSTED_KEY", "sk-ours")
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    async with AsyncExitStack() as exits:
        local = await exits.enter_async_context(fake_upstream())
        hosted = await exits.enter_async_context(fake_upstream())
        hosted.owned_by, hosted.models = "somebody", ["gpt-4", "m", "other"]
        path = tmp_path / "upstreams.toml"
        path.write_text(FILE.format(local=local.url, hosted=hosted.url, default=request.param))
        settings = settings_for(database_url, "http://127.0.0.1:9/v1", tmp_path)
        settings = settings.model_copy(update={"upstreams": path})
        proxy = await exits.enter_async_context(proxy_with(settings, engine))
        yield Setup(proxy, local, hosted)


without_default = pytest.mark.parametrize("setup", [""], indirect=True)


async def test_a_policy_is_served_and_captured_where_it_is(setup: Setup) -> None:
    response = await setup.proxy.chat()
    assert response.headers["x-pawl-policy"] == "m@0"
    assert (await setup.proxy.only_call()).trainable
    assert setup.local.requests[0]["return_token_ids"] is True
    assert not setup.hosted.requests


async def test_another_model_goes_elsewhere_with_our_key_recorded_and_not_trained(
    setup: Setup,
) -> None:
    response = await setup.proxy.chat(
        model="gpt-4", headers={"Authorization": "Bearer client", "x-api-key": "client"}
    )
    assert response.json["model"] == "gpt-4"
    [asked], [headers] = setup.hosted.requests, setup.hosted.headers
    assert asked == {"model": "gpt-4", "messages": [{"role": "user", "content": "q"}]}
    assert headers["Authorization"] == "Bearer sk-ours"
    assert "x-api-key" not in {name.lower() for name in headers}
    assert not setup.local.requests
    call = await setup.proxy.only_call()
    assert (call.trainable, call.reason) == (False, "no_token_ids")


async def test_the_clients_own_key_goes_where_none_of_ours_does(setup: Setup) -> None:
    await setup.proxy.chat(headers={"Authorization": "Bearer client"})
    assert setup.local.headers[0]["Authorization"] == "Bearer client"


@without_default
async def test_a_version_goes_where_its_policy_is(setup: Setup) -> None:
    async with setup.proxy.engine.begin() as connection:
        for statement in PUBLISHED:
            await connection.execute(text(statement))
        await promote(connection, "m", 1, reason="for the test", actor="operator")

    async def swapped() -> bool:
        return (await setup.proxy.chat()).headers["x-pawl-policy"] == "m@1"

    await eventually(swapped)
    # The server does not list it; our trainer loaded it there, so that it gives ids.
    assert setup.local.requests[-1]["model"] == "m@1"
    assert setup.local.requests[-1]["return_token_ids"] is True
    # Versions that the store does not know, asked for by name.
    await setup.proxy.chat(model="qwen-7b@3")
    await setup.proxy.chat(model="gpt-x@3")
    assert setup.local.requests[-1]["model"] == "qwen-7b@3"
    assert [asked["model"] for asked in setup.hosted.requests] == ["gpt-x@3"]


async def test_a_model_that_nobody_claims_goes_to_the_default(setup: Setup) -> None:
    assert (await setup.proxy.chat(model="who")).status == 200
    assert setup.local.requests[0]["model"] == "who"


@without_default
async def test_a_model_that_nobody_answers_for_is_refused_and_recorded(setup: Setup) -> None:
    response = await setup.proxy.chat(model="who")
    assert (response.status, response.headers["x-pawl-fault"]) == (404, "client")
    error = response.json["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"].endswith("Ask for one of: m, text-embedding, qwen*, gpt-*")
    assert not setup.local.requests
    assert not setup.hosted.requests
    assert (await setup.proxy.only_call()).status == "upstream_error"


@without_default
async def test_it_is_refused_in_the_words_of_the_clients_api(setup: Setup) -> None:
    url = f"{setup.proxy.url}/v1/messages"
    async with setup.proxy.session.post(url, json={"model": "who", "messages": []}) as reply:
        assert reply.status == 404
        body = await reply.json()
    assert body["type"] == "error"
    assert "There is no model 'who' here" in body["error"]["message"]


async def test_a_server_that_refuses_its_list_is_not_asked_before_every_call(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.upstreams.server.LOOK_AGAIN_S", 600.0)
    setup.hosted.list_status = 401
    for _ in range(3):
        assert (await setup.proxy.chat(model="gpt-4")).status == 200
    assert setup.hosted.looks == 1
    assert "return_token_ids" not in setup.hosted.requests[-1]


async def test_the_lists_of_models_are_one(setup: Setup) -> None:
    async with setup.proxy.session.get(f"{setup.proxy.url}/v1/models") as reply:
        assert "x-pawl-warning" not in reply.headers
        listed = (await reply.json())["data"]
    # What a request for it would not reach is not listed as the server's.
    assert [(model["id"], model["owned_by"]) for model in listed] == [
        ("m", "vllm"),
        ("gpt-4", "somebody"),
    ]


async def test_a_list_that_is_missing_is_warned_of(setup: Setup) -> None:
    setup.hosted.list_status = 401
    async with setup.proxy.session.get(f"{setup.proxy.url}/v1/models") as reply:
        assert reply.status == 200
        assert reply.headers["x-pawl-warning"] == "no list of models from upstream hosted"
        assert [model["id"] for model in (await reply.json())["data"]] == ["m"]
    setup.local.list_status = 503
    async with setup.proxy.session.get(f"{setup.proxy.url}/v1/models") as reply:
        assert reply.status == 502
        assert "local, hosted" in (await reply.json())["error"]["message"]


async def test_other_requests_go_by_the_model_in_their_body(setup: Setup) -> None:
    async def post(path: str, data: bytes) -> bytes:
        async with setup.proxy.session.post(setup.proxy.url + path, data=data) as reply:
            assert reply.headers["x-upstream"] == "1"
            return await reply.read()

    asked = b'{ "model":"text-embedding", "input":"\xc3\xa9"}'
    assert await post("/v1/embeddings?x=1", asked) == b"other:" + asked
    assert await post("/tokenize", b'{"model":"m"}') == b'other:{"model":"m"}'
    assert await post("/detokenize", b"\x00") == b"other:\x00"
    assert setup.hosted.other == [("POST", "/v1/embeddings?x=1", asked)]
    assert [path for _, path, _ in setup.local.other] == ["/tokenize", "/detokenize"]
    for model in ("gpt-4", "m@1"):
        async with setup.proxy.session.get(f"{setup.proxy.url}/v1/models/{model}") as reply:
            assert await reply.read() == b"other:"
    assert setup.hosted.other[-1] == ("GET", "/v1/models/gpt-4", b"")
    assert setup.local.other[-1] == ("GET", "/v1/models/m@1", b"")


async def test_a_body_too_large_to_be_read_is_refused(setup: Setup) -> None:
    url = f"{setup.proxy.url}/v1/embeddings"
    async with setup.proxy.session.post(url, data=io.BytesIO(b"x" * 2**21)) as reply:
        assert reply.status == 413
        assert "PAWL_MAX_BODY_MB" in (await reply.json())["error"]["message"]


@without_default
async def test_a_request_without_a_model_needs_a_default(setup: Setup) -> None:
    async with setup.proxy.session.post(f"{setup.proxy.url}/tokenize", data=b"{}") as reply:
        assert reply.status == 404
        assert "names no model" in (await reply.json())["error"]["message"]


async def test_a_file_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "u.toml"
    path.write_text("[[upstream]]\nname = 'a'\nurl = 'x'")
    settings = settings_for(None, "http://a/v1", tmp_path).model_copy(update={"upstreams": path})
    for start in (check_upstreams, open_upstreams):
        with pytest.raises(BadUpstreams, match="did you mean urls"):
            start(settings)


def run_pawl(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` beside a litellm that must not be imported."""
    (folder / "litellm.py").write_text("raise AssertionError('litellm was imported')")
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_pawl_proxy_does_not_start_and_says_why_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "u.toml"
    path.write_text(FILE.format(local="http://a/v1", hosted="http://b/v1", default=""))
    start = "import sys; sys.argv = ['pawl', 'proxy']; from pawl.cli import main; main()"
    ended = run_pawl(tmp_path, start, PAWL_UPSTREAMS=str(path))
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"pawl: {path}: upstream 'hosted': api_key_env: the variable HOSTED_KEY")


def test_litellm_is_imported_for_none_but_its_own(tmp_path: Path) -> None:
    path = tmp_path / "u.toml"
    path.write_text(FILE.format(local="http://a/v1", hosted="http://b/v1", default=""))
    # The key stands in `.env`, as settings do.
    (tmp_path / ".env").write_text("HOSTED_KEY=sk\n")
    opened = (
        "from proxy.settings import ProxySettings; import proxy.worker;"
        "import proxy.upstreams.upstreams as u;"
        "u.check_upstreams(ProxySettings()); u.open_upstreams(ProxySettings())"
    )
    ended = run_pawl(tmp_path, opened, PAWL_UPSTREAMS=str(path))
    assert ended.returncode == 0, ended.stderr
    path.write_text("[[upstream]]\nname = 'x'\nkind = 'litellm'\nmodels = ['x']")
    ended = run_pawl(tmp_path, opened, PAWL_UPSTREAMS=str(path))
    assert "litellm was imported" in ended.stderr


def test_litellm_that_is_not_there_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    path = tmp_path / "u.toml"
    path.write_text("[[upstream]]\nname = 'x'\nkind = 'litellm'\nmodels = ['x']")
    settings = settings_for(None, "http://a/v1", tmp_path).model_copy(update={"upstreams": path})
    with pytest.raises(BadUpstreams, match=r"upstream 'x'.*pip install 'pawl\[litellm\]'"):
        check_upstreams(settings)


async def test_the_file_is_read_again_at_sighup_unless_it_cannot_be_used(
    database_url: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as exits:
        old = await exits.enter_async_context(fake_upstream())
        new = await exits.enter_async_context(fake_upstream())
        path = tmp_path / "u.toml"
        table = "[[upstream]]\nname = 'a'\ndefault = true\nurls = ['{}']"
        path.write_text(table.format(old.url))
        settings = settings_for(database_url, "http://127.0.0.1:9/v1", tmp_path)
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pawl.cli", "proxy"),
            cwd=tmp_path,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(ROOT),
                "DATABASE_URL": database_url,
                "PAWL_UPSTREAMS": str(path),
                "PAWL_LISTEN": settings.listen,
                "PAWL_ADMIN_LISTEN": settings.admin_listen,
                "PAWL_SPOOL_DIR": str(settings.spool_dir),
            },
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
        )
        exits.push_async_callback(started.wait)
        exits.callback(started.terminate)
        assert started.stderr is not None
        session = await exits.enter_async_context(aiohttp.ClientSession())
        url = f"http://{settings.listen}/v1/chat/completions"

        async def answers() -> bool:
            try:
                async with session.post(url, json={"model": "m", "messages": []}) as reply:
                    return reply.status == 200
            except aiohttp.ClientError:
                return False

        async def said(what: bytes) -> None:
            assert started.stderr is not None
            while what not in await started.stderr.readline():
                pass

        await eventually(answers)
        path.write_text("[[upstream]")
        started.send_signal(signal.SIGHUP)
        await asyncio.wait_for(said(b"workers_not_replaced"), PATIENCE_S)
        assert await answers()
        assert not new.requests

        path.write_text(table.format(new.url))
        started.send_signal(signal.SIGHUP)
        await asyncio.wait_for(said(b"workers_replaced"), PATIENCE_S)
        assert await answers()
        assert new.requests
