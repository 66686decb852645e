"""The Stop hook of coding agents: it says of a session's episode what the tests say.

What Claude Code 2.1.332 and Codex 0.171.0 give a hook was recorded. The programs themselves are run
where they are installed (npm: `@anthropic-ai/claude-code`, `@openai/codex`) and on the PATH.
"""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks.stack import free_port
from store.records import Episode
from tests.conftest import ROOT
from tests.integration.conftest import Proxy
from tests.support.servers.fake_upstream import FakeUpstream, echo

HOOK = ROOT / "examples/coding_agents/report_tests.py"
SESSION = "01a220c7-333e-7a62-817e-4ae51fb5d596"
GIVEN = {"session_id": SESSION, "hook_event_name": "Stop", "stop_hook_active": False}
# The header by which a client names its session.
HEADERS = {"claude-code": "x-claude-code-session-id", "codex": "session-id"}


async def run(
    *command: str, folder: Path, given: Any = None, **environment: str
) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder)} | environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(json.dumps(given).encode()), 120)
    return process.returncode, out.decode(), err.decode()


async def stop(client: str, url: str, folder: Path, tests: str = "true", **more: str) -> str:
    """Run the hook as a client does; what it says. The client is not disturbed."""
    given = GIVEN | {"cwd": str(folder)}
    environment = {"TEST_COMMAND": tests} | more
    command = (sys.executable, str(HOOK), client, url)
    status, out, err = await run(*command, folder=Path("/"), given=given, **environment)
    assert (status, out) == (0, "")
    assert len(err.splitlines()) == 1
    return err


async def rewards(proxy: Proxy, calls: int = 1) -> dict[str, list[Any]]:
    def rewarded(found: list[Episode]) -> bool:
        return any(episode.feedback for episode in found)

    found = await proxy.episodes(calls, rewarded)
    return {episode.key: [one.value for one in episode.feedback] for episode in found}


@pytest.mark.parametrize("client", HEADERS)
@pytest.mark.parametrize(("tests", "value"), [("test -f a", 1.0), ("echo no; test -f b", 0.0)])
async def test_tests_become_the_reward_of_the_sessions_episode(
    client: str, tests: str, value: float, proxy: Proxy, tmp_path: Path
) -> None:
    (tmp_path / "a").touch()
    await proxy.chat(headers={HEADERS[client]: SESSION})
    await stop(client, f"{proxy.url}/v1", tmp_path, tests)
    assert await rewards(proxy) == {f"{client}:{SESSION}": [value]}


async def test_name_in_address_or_header_goes_before_the_session(
    proxy: Proxy, tmp_path: Path
) -> None:
    prefix = "/task/t/episode/run%2013"
    await proxy.chat(prefix, headers={HEADERS["codex"]: SESSION})
    await stop("codex", f"{proxy.url}{prefix}/v1/", tmp_path)
    assert await rewards(proxy) == {"run 13": [1.0]}
    said = "x-other: a\nX-Pawl-Episode: run-14"
    shown = await stop("claude-code", proxy.url, tmp_path, ANTHROPIC_CUSTOM_HEADERS=said)
    assert shown.endswith("reward 1 for run-14\n")


@pytest.mark.parametrize(
    ("tests", "named"),
    [
        ("", "TEST_COMMAND is not set"),
        ("no-such-program", "did not run"),
        ("kill $$", "did not run"),
    ],
)
async def test_tests_that_did_not_run_say_nothing(
    tests: str, named: str, proxy: Proxy, tmp_path: Path
) -> None:
    assert named in await stop("codex", proxy.url, tmp_path, tests)


async def test_proxy_that_is_away_does_not_stop_the_agent(tmp_path: Path) -> None:
    assert "no reward" in await stop("codex", f"http://127.0.0.1:{free_port()}", tmp_path)


async def test_claude_code_reports_its_tests(proxy: Proxy, tmp_path: Path) -> None:
    claude = installed("claude")
    hooks_in(tmp_path / ".claude/settings.json", f"{sys.executable} {HOOK} claude-code")
    status, out, err = await run(
        *(claude, "-p", "Mend it."),
        folder=tmp_path,
        ANTHROPIC_BASE_URL=proxy.url,
        ANTHROPIC_API_KEY="unused",
        ANTHROPIC_MODEL="m",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="m",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
        TEST_COMMAND="false",
    )
    assert status == 0, out + err
    [(key, values)] = (await rewards(proxy)).items()
    assert key.startswith("claude-code:")
    assert values == [0.0]


async def test_codex_reports_its_tests(
    proxy: Proxy, upstream: FakeUpstream, tmp_path: Path
) -> None:
    codex = installed("codex")
    upstream.behave_otherwise = responses
    home = tmp_path / "home"
    hooks_in(home / "hooks.json", f"{sys.executable} {HOOK} codex {proxy.url}/v1")
    (home / "config.toml").write_text(
        'model = "m"\nmodel_provider = "pawl"\n[model_providers.pawl]\nname = "pawl"\n'
        f'base_url = "{proxy.url}/v1"\nwire_api = "responses"\n'
    )
    status, out, err = await run(
        *(codex, "exec", "--skip-git-repo-check", "--dangerously-bypass-hook-trust", "Mend it."),
        folder=tmp_path,
        CODEX_HOME=str(home),
        TEST_COMMAND="true",
    )
    assert status == 0, out + err
    [(key, values)] = (await rewards(proxy)).items()
    assert key.startswith("codex:")
    assert values == [1.0]


def installed(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


def hooks_in(file: Path, command: str) -> None:
    """Write the hook into a client's settings, as docs/howto/coding-agents.md shows it."""
    file.parent.mkdir(exist_ok=True)
    hook = {"type": "command", "command": command, "timeout": 600}
    file.write_text(json.dumps({"hooks": {"Stop": [{"hooks": [hook]}]}}))


async def responses(request: web.Request) -> web.StreamResponse:
    """Stream a response of one text, as far as Codex reads it."""
    if request.path != "/v1/responses":
        return await echo(request)
    text = {"type": "output_text", "text": "done", "annotations": []}
    item = {"type": "message", "id": "msg_1", "role": "assistant", "content": [text]}
    response = {"id": "resp_1", "object": "response", "model": "m", "status": "completed"}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    for kind, said in (
        ("response.created", {"response": response | {"output": []}}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": response | {"output": [item], "usage": usage}}),
    ):
        event = json.dumps({"type": kind} | said)
        await stream.write(f"event: {kind}\ndata: {event}\n\n".encode())
    return stream
