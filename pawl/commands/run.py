"""`pawl run`: start an installed coding agent against a running Pawl.

A session is one episode, named in the base URL. The agent's configuration is in a temporary folder.
"""

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlencode
from uuid import uuid4

import aiohttp
import typer

from pawl.coding_agents import CODING_AGENTS, AgentSetup, Session
from pawl.commands.common import fail, with_flags
from pawl.commands.rollout import proxy_address
from pawl.judging.answers import JudgeError
from pawl.judging.feedback import FeedbackClient
from pawl.programs import without_pawl_settings
from pawl.rollout.agents import run_url
from pawl.rollout.proxy import Models, ProxyClient
from pawl.rollout.tasks import RolloutError
from pawl.settings import ConsoleSettings, read_settings
from proxy.identity.identify import why_unusable
from store.limited_bodies import LimitedResponse
from store.records import REWARD, Record

# Statuses of a shell that could not run a command (126, 127), or whose command was killed by signal
# N (128 + N, up to 64 of them).
NOT_RUN_STATUSES: Final = range(126, 193)


class RunFlags(Record, frozen=True, kw_only=True):
    """The arguments of `pawl run`."""

    agent: Annotated[
        str, typer.Argument(help=", ".join(CODING_AGENTS), metavar="AGENT", show_default=False)
    ]
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After `--`: arguments of the agent's own.")
    ] = None
    task: Annotated[
        str | None,
        typer.Option(help="Name of the task; default: Pawl finds it by the first prompt."),
    ] = None
    score: Annotated[
        str | None,
        typer.Option(
            help="Shell command that is run here after the agent; its status 0 is posted as the "
            "reward 1, another as 0."
        ),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(help="Policy, or version NAME@N, to ask for; default: the only policy."),
    ] = None
    url: Annotated[
        str | None, typer.Option(help="The proxy's address; default: http:// and PAWL_LISTEN.")
    ] = None


@with_flags(RunFlags)
def run(flags: RunFlags) -> None:
    """Start an installed coding agent against Pawl; its session is one episode.

    `pawl run claude --task NAME --score "pytest -q" -- ARGUMENTS`. The agent runs here, in the
    foreground, with a configuration of its own that is removed at the end: yours is not changed.
    Needs a proxy, and no database.

    Status: the agent's own. Status 2: the agent could not be started, or the reward could not be
    posted. Status 130: Ctrl-C, while the score is found.
    """
    try:
        status = _run(flags)
    except RolloutError as error:
        fail(str(error))
    except KeyboardInterrupt:
        status = 130
    raise SystemExit(status)


def _run(flags: RunFlags) -> int:
    """Run the agent, print its episode, and post its score; return its status.

    Raises:
        RolloutError: the agent cannot be started or scored, or the reward cannot be posted.
    """
    agent = CODING_AGENTS.get(flags.agent)
    if agent is None:
        raise RolloutError(f"no agent {flags.agent!r}: name one of {', '.join(CODING_AGENTS)}")
    if flags.task is not None and (wrong := why_unusable(flags.task)):
        raise RolloutError(f"--task {wrong}: give another name")
    program = shutil.which(flags.agent)
    if program is None:
        raise RolloutError(f"{flags.agent} is not on the PATH: install it with `{agent.install}`")
    settings, url = read_settings(ConsoleSettings), proxy_address(flags.url)
    models = asyncio.run(_ask_models(url, settings.headers))
    episode = f"{flags.agent}-{uuid4().hex[:12]}"
    # Not in the default temporary folder: Codex does not create its helper programs there.
    place = tempfile.TemporaryDirectory(
        prefix="pawl-run-", dir="/var/tmp", ignore_cleanup_errors=True
    )
    model = _choose_model(flags.policy, models)
    with place as folder:
        setup = agent.setup(
            Session(
                url=run_url(url, task=flags.task, episode=episode, split=None),
                model=model,
                key=settings.key or "unused",
                folder=Path(folder),
                project=Path.cwd(),
                # A version may state no context; its base model does.
                context=models.contexts.get(model, min(models.contexts.values(), default=None)),
            )
        )
        write_files(setup, Path(folder))
        status = _in_foreground(
            [program, *setup.arguments, *(flags.arguments or ())],
            {**without_pawl_settings(os.environ), **setup.environment},
        )
    if Path(folder).exists():
        _say(f"{folder} could not be removed: remove it, as the agent's files there hold its key")
    _say(f"{flags.agent} ended with status {status}; its episode is {episode}")
    if flags.url is None:
        console = f"http://{settings.console_listen}{settings.console_prefix}"
        _say(f"console: {console}/episodes?{urlencode({'text': episode})}")
    if flags.score is None:
        _say(f"score it: {_curl_command(url, episode, has_key=settings.key is not None)}")
    else:
        reward = _run_score(flags.score)
        asyncio.run(_post_reward(url, settings.headers, episode, reward))
        _say(f"{flags.score!r} says: reward {reward:g}")
    return status


def write_files(setup: AgentSetup, folder: Path) -> None:
    """Write an agent's files, which contain the key, to a folder that only this user may read.

    Raises:
        RolloutError: the files cannot be written.
    """
    try:
        for name, content in setup.files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
    except OSError as error:
        raise RolloutError(
            f"the agent's files cannot be written to {folder}: {error.strerror}; make room there"
        ) from error


def _choose_model(policy: str | None, models: Models) -> str:
    policies = {one.rpartition("@")[0] for one in models.serving} or models.names
    if policy is None and len(policies) == 1:
        return next(iter(policies))
    if policy is None or not models.has(policy):
        wrong = "several policies" if policy is None else f"no {policy!r}"
        known = ", ".join(sorted(models.names | policies)) or "none"
        raise RolloutError(f"the proxy has {wrong}: name one with --policy; its models are {known}")
    return policy


def _in_foreground(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program on this terminal, and return its status as a shell does.

    Ctrl-C reaches the program from the terminal; SIGTERM and SIGHUP are forwarded to it.

    Raises:
        RolloutError: the program cannot be started.
    """
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise RolloutError(f"{command[0]} cannot be started: {error.strerror}") from error
    handlers = {
        signal.SIGINT: lambda number, frame: None,
        signal.SIGTERM: lambda number, frame: process.send_signal(number),
        signal.SIGHUP: lambda number, frame: process.send_signal(number),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status


def _run_score(command: str) -> float:
    """Run a shell command, and return 1 for its status 0, else 0.

    Raises:
        RolloutError: the command could not be run, or was killed: the agent is not at fault.
    """
    status = subprocess.run(
        command, shell=True, check=False, env=without_pawl_settings(os.environ)
    ).returncode
    if status in NOT_RUN_STATUSES or status < 0:
        raise RolloutError(
            f"--score: {command!r} could not be run, or was killed (status {status}), so no reward"
            " is posted: correct the command, and post the reward yourself"
        )
    return float(status == 0)


async def _ask_models(url: str, headers: Mapping[str, str]) -> Models:
    async with aiohttp.ClientSession(headers=headers, response_class=LimitedResponse) as session:
        return await ProxyClient(session, url).models()


async def _post_reward(url: str, headers: Mapping[str, str], episode: str, reward: float) -> None:
    statement = {"metric": REWARD, "value": reward, "episode": episode}
    async with aiohttp.ClientSession(response_class=LimitedResponse) as session:
        client = FeedbackClient(session, f"{url}/feedback", key=headers)
        try:
            await client.post([statement], f"run-{episode}")
        except JudgeError as error:
            again = _curl_command(url, episode, has_key=bool(headers), reward=reward)
            raise RolloutError(f"no reward is posted: {error}; post it: {again}") from error


def _curl_command(url: str, episode: str, *, has_key: bool, reward: float = 1.0) -> str:
    body = json.dumps({"metric": REWARD, "value": reward, "episode": episode})
    key = '-H "Authorization: Bearer $PAWL_API_KEY" ' if has_key else ""
    return f"curl {shlex.quote(f'{url}/feedback')} {key}-d {shlex.quote(body)}"


def _say(line: str) -> None:
    print(f"pawl: {line}", file=sys.stderr)
