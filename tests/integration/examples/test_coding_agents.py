"""The Stop hook of coding agents: it says of a session's episode what the tests say.

What Claude Code 2.1.332 and Codex 0.171.0 give a hook was recorded. The programs themselves are run
where they are installed (npm: `@anthropic-ai/claude-code`, `@openai/codex`) and on the PATH.
"""

import asyncio
import json
import os
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from aiohttp import web

from benchmarks.stack import free_port
from pawl.judging.executions import Line, executions
from pawl.judging.exit_status import ExitStatusJudge
from pawl.judging.git import lines_written
from store.read.lines import encoded_line
from store.records import Episode
from tests.conftest import ROOT
from tests.integration.conftest import Proxy
from tests.support.servers.fake_upstream import DONE, FakeUpstream, Handler, echo, streams

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
async def test_stop_hook_posts_the_test_result_as_reward_of_the_sessions_episode(
    client: str, tests: str, value: float, proxy: Proxy, tmp_path: Path
) -> None:
    (tmp_path / "a").touch()
    await proxy.chat(headers={HEADERS[client]: SESSION})
    await stop(client, f"{proxy.url}/v1", tmp_path, tests)
    assert await rewards(proxy) == {f"{client}:{SESSION}": [value]}


async def test_episode_named_in_address_or_header_overrides_the_session(
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
        ("no-such-program", "could not be run, or was killed (status 127)"),
        ("kill $$", "could not be run, or was killed (status -15)"),
        ("sh -c 'kill $$'; exit $?", "could not be run, or was killed (status 143)"),
    ],
)
async def test_stop_hook_says_why_the_tests_did_not_run(
    tests: str, named: str, proxy: Proxy, tmp_path: Path
) -> None:
    assert named in await stop("codex", proxy.url, tmp_path, tests)


async def test_unreachable_proxy_does_not_stop_the_agent(tmp_path: Path) -> None:
    assert "no reward" in await stop("codex", f"http://127.0.0.1:{free_port()}", tmp_path)


RUNS_TESTS = "python3 -m unittest no_such_module"


async def judged(proxy: Proxy) -> Any:
    """What the judge by tests and the judge by git say of the only episode."""
    [episode] = await proxy.episodes(2)
    line = encoded_line(episode, datetime.now(UTC))
    [statement] = await ExitStatusJudge().judge(episode.key, line)
    return statement["value"], lines_written(executions(msgspec.json.decode(line, type=Line)))


async def test_claude_code_session_is_rewarded_by_its_test_result(
    proxy: Proxy, upstream: FakeUpstream, tmp_path: Path
) -> None:
    claude = installed("claude")
    file = tmp_path / "b.py"
    upstream.behave = chat(
        ("Write", {"file_path": str(file), "content": "one\n"}), ("Bash", {"command": RUNS_TESTS})
    )
    hooks_in(tmp_path / ".claude/settings.json", f"{sys.executable} {HOOK} claude-code")
    status, out, err = await run(
        *(claude, "-p", "Mend it.", "--dangerously-skip-permissions"),
        folder=tmp_path,
        ANTHROPIC_BASE_URL=proxy.url,
        ANTHROPIC_API_KEY="unused",
        ANTHROPIC_MODEL="m",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="m",
        IS_SANDBOX="1",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
        TEST_COMMAND="false",
    )
    assert status == 0, out + err
    [(key, values)] = (await rewards(proxy)).items()
    assert key.startswith("claude-code:")
    assert values == [0.0]
    assert await judged(proxy) == (0, {str(file): {"one"}})


async def test_codex_session_is_rewarded_by_its_test_result(
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
        *(codex, "exec", "--skip-git-repo-check", "--dangerously-bypass-hook-trust"),
        *("--dangerously-bypass-approvals-and-sandbox", "Mend it."),
        folder=tmp_path,
        CODEX_HOME=str(home),
        TEST_COMMAND="true",
    )
    assert status == 0, out + err
    [(key, values)] = (await rewards(proxy)).items()
    assert key.startswith("codex:")
    assert values == [1.0]
    assert await judged(proxy) == (0, {"b.py": {"one"}})


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


PATCH = "*** Begin Patch\n*** Add File: b.py\n+one\n*** End Patch"


def chat(*tools: tuple[str, Any]) -> Handler:
    """Stream a call of these tools, then a text; a request without tools has a text alone."""

    async def handle(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        names = {tool["function"]["name"] for tool in asked.get("tools", ())}
        said: dict[str, Any] = {"content": "done"}
        if {name for name, _ in tools} <= names and asked["messages"][-1]["role"] != "tool":
            said = {
                "tool_calls": [
                    {
                        "index": place,
                        "id": f"chatcmpl-tool-{uuid4().hex}",
                        "type": "function",
                        "function": {"name": name, "arguments": json.dumps(arguments)},
                    }
                    for place, (name, arguments) in enumerate(tools)
                ]
            }
        finish = "tool_calls" if "tool_calls" in said else "stop"
        pieces = []
        for delta, ends in (({"role": "assistant"}, None), (said, None), ({}, finish)):
            choice = {"index": 0, "delta": delta, "finish_reason": ends}
            chunk = {"id": "chatcmpl-1", "model": asked["model"], "choices": [choice]}
            pieces.append(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        return await streams(*pieces, DONE)(request)

    return handle


async def responses(request: web.Request) -> web.StreamResponse:
    """Stream calls of Codex's tools, then a text, as far as Codex reads it."""
    if request.path != "/v1/responses":
        return await echo(request)
    asked = await request.json()
    text = {"type": "output_text", "text": "done", "annotations": []}
    items: list[Any] = [{"type": "message", "id": "m1", "role": "assistant", "content": [text]}]
    if asked["input"][-1]["type"] != "function_call_output":
        commands = (f"apply_patch <<'E'\n{PATCH}\nE", RUNS_TESTS)
        items = [
            {
                "type": "function_call",
                "id": f"fc_{place}",
                "call_id": f"call_{uuid4().hex}",
                "name": "exec_command",
                "arguments": json.dumps({"cmd": command}),
            }
            for place, command in enumerate(commands)
        ]
    response = {"id": f"resp_{uuid4().hex}", "object": "response", "model": "m"}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    ended = response | {"status": "completed", "output": items, "usage": usage}
    events: list[Any] = [
        {"type": "response.created", "response": response | {"output": []}},
        *(
            {"type": "response.output_item.done", "output_index": place, "item": item}
            for place, item in enumerate(items)
        ),
        {"type": "response.completed", "response": ended},
    ]
    pieces = [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in events]
    return await streams(*pieces)(request)
