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

from proxy.errors import BadUpstreams
from proxy.settings import ProxySettings
from proxy.upstreams.server import LIST_BYTES
from proxy.upstreams.upstreams import SamplingDefaults, check_upstreams, open_upstreams
from tests.conftest import ROOT
from tests.integration.conftest import Proxy, StartProxy, settings_for
from tests.support.ledger.lineage import promote, trained
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


@dataclass
class Setup:
    """A proxy before two servers; only the first is vLLM."""

    proxy: Proxy
    local: FakeUpstream
    hosted: FakeUpstream


@pytest.fixture(params=["default = true"])
async def setup(
    upstream: FakeUpstream,
    start_proxy: StartProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Setup]:
    monkeypatch.setenv("HOSTED_KEY", "sk-ours")
    path = tmp_path / "upstreams.toml"
    async with fake_upstream() as hosted:
        hosted.owned_by, hosted.models = "somebody", ["gpt-4", "m", "other"]
        path.write_text(FILE.format(local=upstream.url, hosted=hosted.url, default=request.param))
        async with start_proxy(upstreams=path) as proxy:
            yield Setup(proxy, upstream, hosted)


without_default = pytest.mark.parametrize("setup", [""], indirect=True)


async def test_policy_is_served_and_captured_at_its_own_upstream(setup: Setup) -> None:
    response = await setup.proxy.chat()
    assert response.headers["x-pawl-policy"] == "m@0"
    assert (await setup.proxy.only_call()).trainable
    assert setup.local.requests[0]["return_token_ids"] is True
    assert not setup.hosted.requests


async def test_call_of_another_upstreams_model_has_the_configured_key_and_is_not_trained(
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


async def test_clients_key_goes_to_an_upstream_without_a_key_of_ours(setup: Setup) -> None:
    await setup.proxy.chat(headers={"Authorization": "Bearer client"})
    assert setup.local.headers[0]["Authorization"] == "Bearer client"


@without_default
async def test_version_goes_to_its_policys_upstream(setup: Setup) -> None:
    async with setup.proxy.engine.begin() as connection:
        await trained(connection, 0)
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


async def test_model_that_no_upstream_claims_goes_to_the_default_upstream(setup: Setup) -> None:
    assert (await setup.proxy.chat(model="who")).status == 200
    assert setup.local.requests[0]["model"] == "who"


@without_default
async def test_model_that_no_upstream_claims_is_404_and_recorded_without_a_default_upstream(
    setup: Setup,
) -> None:
    response = await setup.proxy.chat(model="who")
    assert (response.status, response.headers["x-pawl-fault"]) == (404, "client")
    error = response.json["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"].endswith("Ask for one of: m, text-embedding, qwen*, gpt-*")
    assert not setup.local.requests
    assert not setup.hosted.requests
    assert (await setup.proxy.only_call()).status == "upstream_error"


@without_default
async def test_unknown_model_is_refused_in_the_error_format_of_the_clients_api(
    setup: Setup,
) -> None:
    reply = await setup.proxy.ask("POST", "/v1/messages", model="who", messages=[])
    assert (reply.status, reply.json["type"]) == (404, "error")
    assert "There is no model 'who' here" in reply.json["error"]["message"]


async def test_upstream_that_refuses_its_list_of_models_is_not_asked_again_before_every_call(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.upstreams.server.LIST_EVERY_S", 600.0)
    setup.hosted.list_status = 401
    for _ in range(3):
        assert (await setup.proxy.chat(model="gpt-4")).status == 200
    assert setup.hosted.looks == 1
    assert "return_token_ids" not in setup.hosted.requests[-1]


async def test_lists_of_models_of_all_upstreams_are_merged(setup: Setup) -> None:
    reply = await setup.proxy.ask("GET", "/v1/models")
    assert "x-pawl-warning" not in reply.headers
    # What a request for it would not reach is not listed as the server's.
    assert [(model["id"], model["owned_by"]) for model in reply.json["data"]] == [
        ("m", "vllm"),
        ("gpt-4", "somebody"),
    ]


async def test_list_of_models_beyond_the_size_limit_counts_as_missing(setup: Setup) -> None:
    setup.hosted.models = ["x" * LIST_BYTES]
    reply = await setup.proxy.ask("GET", "/v1/models")
    assert reply.headers["x-pawl-warning"] == "no list of models from upstream hosted"


async def test_missing_list_of_models_is_a_warning_and_502_if_all_upstreams_miss_theirs(
    setup: Setup,
) -> None:
    setup.hosted.list_status = 401
    reply = await setup.proxy.ask("GET", "/v1/models")
    assert reply.status == 200
    assert reply.headers["x-pawl-warning"] == "no list of models from upstream hosted"
    assert [model["id"] for model in reply.json["data"]] == ["m"]
    setup.local.list_status = 503
    reply = await setup.proxy.ask("GET", "/v1/models")
    assert reply.status == 502
    assert "local, hosted" in reply.json["error"]["message"]


async def test_requests_other_than_calls_are_routed_by_the_model_in_their_body(
    setup: Setup,
) -> None:
    embed = b'{ "model":"text-embedding", "input":"\xc3\xa9"}'
    for path, data in (
        ("/v1/embeddings?x=1", embed),
        ("/tokenize", b'{"model":"m"}'),
        ("/detokenize", b"\x00"),
    ):
        reply = await setup.proxy.ask("POST", path, data=data)
        assert (reply.headers["x-upstream"], reply.body) == ("1", b"other:" + data)
    assert setup.hosted.other == [("POST", "/v1/embeddings?x=1", embed)]
    assert [path for _, path, _ in setup.local.other] == ["/tokenize", "/detokenize"]
    for model in ("gpt-4", "m@1"):
        assert (await setup.proxy.ask("GET", f"/v1/models/{model}")).body == b"other:"
    assert setup.hosted.other[-1] == ("GET", "/v1/models/gpt-4", b"")
    assert setup.local.other[-1] == ("GET", "/v1/models/m@1", b"")


async def test_body_too_large_to_be_read_for_its_model_is_413(setup: Setup) -> None:
    reply = await setup.proxy.ask("POST", "/v1/embeddings", data=io.BytesIO(b"x" * 2**21))
    assert reply.status == 413
    assert "PAWL_MAX_BODY_MB" in reply.json["error"]["message"]


@without_default
async def test_request_that_names_no_model_is_404_without_a_default_upstream(setup: Setup) -> None:
    reply = await setup.proxy.ask("POST", "/tokenize", data=b"{}")
    assert reply.status == 404
    assert "names no model" in reply.json["error"]["message"]


async def test_each_upstream_samples_with_defaults_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "upstreams.toml"
    file.write_text(
        '[[upstream]]\nname = "a"\nurls = ["http://a/v1"]\nmodels = ["a"]\n'
        "default_sampling = { temperature = 0.6, top_p = 0.9, top_k = 20 }\n"
        '[[upstream]]\nname = "b"\nurls = ["http://b/v1"]\nmodels = ["b"]\n'
    )
    known = open_upstreams(
        ProxySettings(upstreams=file, default_temperature=0.8, default_sampling={"top_p": 0.95})
    )
    assert known.sampling_defaults("a@3") == SamplingDefaults(0.6, {"top_p": 0.9, "top_k": 20})
    assert known.sampling_defaults("b") == SamplingDefaults(0.8, {"top_p": 0.95})
    assert known.sampling_defaults("neither") == SamplingDefaults(1.0, {})
    await known.close()


async def test_unusable_upstreams_file_stops_the_start(tmp_path: Path) -> None:
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


def test_missing_variable_of_an_upstreams_key_stops_the_start_with_a_single_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "u.toml"
    path.write_text(FILE.format(local="http://a/v1", hosted="http://b/v1", default=""))
    start = "import sys; sys.argv = ['pawl', 'proxy']; from pawl.cli import main; main()"
    ended = run_pawl(tmp_path, start, PAWL_UPSTREAMS=str(path))
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"pawl: {path}: upstream 'hosted': api_key_env: the variable HOSTED_KEY")


def test_litellm_is_imported_only_for_litellm_upstreams(tmp_path: Path) -> None:
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


def test_upstreams_key_may_be_read_from_a_secret_file(tmp_path: Path) -> None:
    path = tmp_path / "u.toml"
    path.write_text(FILE.format(local="http://a/v1", hosted="http://b/v1", default=""))
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "HOSTED_KEY").write_text("sk\n")
    settings = settings_for(None, "http://a/v1", tmp_path).model_copy(
        update={"upstreams": path, "secrets_dir": tmp_path / "secrets"}
    )
    check_upstreams(settings)


def test_missing_litellm_is_refused_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    path = tmp_path / "u.toml"
    path.write_text("[[upstream]]\nname = 'x'\nkind = 'litellm'\nmodels = ['x']")
    settings = settings_for(None, "http://a/v1", tmp_path).model_copy(update={"upstreams": path})
    with pytest.raises(
        BadUpstreams, match=r"upstream 'x'.*pip install 'pawl_rl-.*\.whl\[litellm\]'"
    ):
        check_upstreams(settings)


async def test_upstreams_file_is_read_again_at_sighup_unless_it_is_unusable(
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
