"""`pawl run` with a program of the test's own in place of a coding agent, and a real proxy."""

import asyncio
import os
import resource
import signal
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.stack import free_port
from store.records import Episode
from tests.conftest import ROOT
from tests.integration.conftest import Proxy
from tests.support.waiting import until

# Named as one of the agents, and pointed to Pawl as that one is.
AGENT = f"""#!{sys.executable}
import json, os, signal, sys, time, urllib.request
model = sys.argv[sys.argv.index("-m") + 1].removeprefix("openai/")
for text in sys.stdin.read().splitlines():
    body = {{"model": model, "messages": [{{"role": "user", "content": text}}]}}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={{"Content-Type": "application/json"}},
    )
    print(json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["message"])
print("folder", os.environ["MSWEA_GLOBAL_CONFIG_DIR"], os.environ["HOME"])
print("ours", [name for name in os.environ if name.startswith("PAWL_")])
sys.stdout.flush()
if "wait" in sys.argv:
    open("waits", "w").close()
    signal.pause()
sys.exit(int(sys.argv[-1]))
"""


class Outcome(NamedTuple):
    """Tell how `pawl run` ended."""

    status: int | None
    out: str
    errors: str


def limit_files(most_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))


async def start(
    folder: Path, url: str, *options: str, agent: str = "mini", most_bytes: int | None = None
) -> asyncio.subprocess.Process:
    """Start `pawl run` in a folder, with the agent on the PATH; it may write files so large."""
    program = folder / "bin" / agent
    program.parent.mkdir()
    program.write_text(AGENT)
    program.chmod(0o755)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "pawl.cli", "run", *options),
        cwd=folder,
        env=os.environ
        | {"PATH": f"{program.parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        | {"HOME": str(folder), "PAWL_LISTEN": url.removeprefix("http://")},
        preexec_fn=None if most_bytes is None else partial(limit_files, most_bytes),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def run(folder: Path, url: str, *options: str) -> Outcome:
    """Run it to its end; it is given two prompts on standard input."""
    process = await start(folder, url, *options)
    out, errors = await asyncio.wait_for(process.communicate(b"one\ntwo\n"), 60)
    return Outcome(process.returncode, out.decode(), errors.decode())


@pytest.mark.parametrize(("score", "reward"), [("test -f bin/mini", 1.0), ("false", 0.0)])
async def test_session_becomes_a_single_episode_with_task_and_score(
    score: str, reward: float, proxy: Proxy, tmp_path: Path
) -> None:
    options = ("mini", "--task", "a/b", "--score", score, "--", "3")
    outcome = await run(tmp_path, proxy.url, *options)
    assert outcome.status == 3, outcome.errors

    def is_scored(found: list[Episode]) -> bool:
        return bool(found[0].feedback)

    [episode] = await proxy.episodes(2, is_scored)
    assert (episode.method, episode.task) == ("url", "a/b")
    assert [call.policy for call in episode.calls] == ["m", "m"]
    assert [(one.metric, one.value) for one in episode.feedback] == [("reward", reward)]
    assert f"its episode is {episode.key}" in outcome.errors
    assert f"/episodes?text={episode.key}" in outcome.errors


async def test_agents_folder_is_removed_and_nothing_is_written_to_the_home(
    proxy: Proxy, tmp_path: Path
) -> None:
    outcome = await run(tmp_path, proxy.url, "mini", "--", "0")
    assert outcome.status == 0, outcome.errors
    folder, home = outcome.out.split("folder ")[1].splitlines()[0].split()
    assert not Path(folder).exists()
    assert home == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("bin", "spool")] == []
    assert "ours []" in outcome.out
    assert f"score it: curl {proxy.url}/feedback -d " in outcome.errors


async def test_signal_reaches_the_agent(proxy: Proxy, tmp_path: Path) -> None:
    process = await start(tmp_path, proxy.url, "mini", "--", "wait")
    assert process.stdin is not None
    process.stdin.close()
    await until((tmp_path / "waits").exists)
    process.send_signal(signal.SIGTERM)
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "its episode is mini-" in errors.decode()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("emacs",), "no agent 'emacs': name one of claude, codex"),
        (("aider",), "aider is not on the PATH: install it with `pip install aider-chat`"),
        (("mini", "--policy", "x"), "the proxy has no 'x': name one with --policy"),
        (("mini", "--task", " "), "--task is empty: give another name"),
    ],
)
async def test_session_that_cannot_begin_is_refused_in_a_single_line(
    options: tuple[str, ...], message: str, proxy: Proxy, tmp_path: Path
) -> None:
    outcome = await run(tmp_path, proxy.url, *options)
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.errors.startswith(f"pawl: {message}")
    assert outcome.errors.count("\n") == 1


async def test_missing_proxy_is_reported_before_the_agent_is_started(tmp_path: Path) -> None:
    outcome = await run(tmp_path, f"http://127.0.0.1:{free_port()}", "mini")
    assert (outcome.status, outcome.out) == (2, "")
    assert "no proxy answers at" in outcome.errors


@pytest.mark.parametrize(
    ("command", "status"),
    [("no-such-program", 127), ("kill -9 $$", -9), ("sh -c 'kill -9 $$'; exit $?", 137)],
)
async def test_score_command_that_cannot_run_or_is_killed_posts_nothing(
    proxy: Proxy, tmp_path: Path, command: str, status: int
) -> None:
    outcome = await run(tmp_path, proxy.url, "mini", "--score", command, "--", "0")
    assert outcome.status == 2
    assert f"could not be run, or was killed (status {status}), so no reward" in outcome.errors
    [episode] = await proxy.episodes(2)
    assert not episode.feedback


async def test_full_disk_is_named_before_the_agent_is_started(proxy: Proxy, tmp_path: Path) -> None:
    process = await start(tmp_path, proxy.url, "pi", agent="pi", most_bytes=0)
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out) == (2, b"")
    assert b"pawl: the agent's files cannot be written to /var/tmp/pawl-run-" in errors
    assert errors.count(b"\n") == 1
