"""Run `pawl rollout` as a process, with an agent that knows only the variables of its SDK."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pawl.rollout.journal import Begun, Ended, Line, RunKey
from tests.conftest import ROOT
from tests.support.waiting import until

# A `Runner` takes it before the options, and writes it after them.
COMMAND = ("--", sys.executable, "agent.py")
TASKS = [{"id": f"t{number}", "q": f"q{number}", "a": f"echo q{number % 3}"} for number in range(6)]
AGENT = '''
"""Asks what its task says, and does what else its task says."""
import json, os, sys, time, urllib.request


def ask(base_url, text):
    body = {"model": os.environ.get("OPENAI_MODEL", "m")}
    body |= {"messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        base_url + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def answer(task):
    said = ask(os.environ["OPENAI_BASE_URL"], task.get("q", "hello"))
    match task.get("do"):
        case "exit":
            print("no idea", file=sys.stderr)
            sys.exit(3)
        case "exit late":
            time.sleep(4)
            sys.exit(3)
        case "raise":
            raise ValueError("no idea")
        case "hang":
            time.sleep(60)
        case "die":
            os.kill(os.getpid(), 9)
        case "flood":
            return "x" * 3_000_000
        case "environment":
            return {name: value for name, value in os.environ.items() if "ROLLOUT" in name}
        case "all it knows":
            return [task, dict(os.environ)]
    time.sleep(task.get("seconds", 0))
    return said


async def alone(task):
    import asyncio
    return await asyncio.to_thread(answer, task)


if __name__ == "__main__":
    said = answer(json.loads(sys.stdin.readline()))
    print(said if isinstance(said, str) else json.dumps(said))
'''


class Outcome(NamedTuple):
    """Tell how `pawl rollout` ended."""

    status: int
    summary: dict[str, Any]
    errors: str


class Runner:
    """Run `pawl rollout`, or another command, in a folder with tasks and the agent in it."""

    def __init__(
        self,
        folder: Path,
        url: str,
        tasks: Sequence[dict[str, Any]],
        *command: str,
        journal: str = "tasks.rollout.jsonl",
    ) -> None:
        self.folder = folder
        self.url = url
        self.command = command or ("rollout",)
        (folder / "agent.py").write_text(AGENT)
        self.write(tasks)
        self.journal = folder / journal

    def write(self, tasks: Sequence[dict[str, Any]]) -> None:
        """Write the file of tasks."""
        text = "".join(json.dumps(task) + "\n" for task in tasks)
        (self.folder / "tasks.jsonl").write_text(text)

    async def start(
        self, *options: str, terminal: int = asyncio.subprocess.PIPE, **environment: str
    ) -> asyncio.subprocess.Process:
        """Start the command; what it shows goes to the terminal of that descriptor, if any."""
        if options[: len(COMMAND)] == COMMAND:
            options = (*options[len(COMMAND) :], *COMMAND)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "pawl.cli", *self.command, "--tasks", "tasks.jsonl"),
            *("--url", self.url, *options),
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=terminal,
        )

    async def run(self, *options: str, **environment: str) -> Outcome:
        """Run the command to its end."""
        return await ended(await self.start(*options, **environment))

    def settled(self) -> list[tuple[RunKey, Ended]]:
        """Return the settled runs."""
        if not self.journal.exists():
            return []
        whole, _, _ = self.journal.read_bytes().rpartition(b"\n")
        lines = [msgspec.json.decode(text, type=Line) for text in whole.splitlines()]
        keys = {line.episode: line.key for line in lines if isinstance(line, Begun)}
        ends = [line for line in lines if isinstance(line, Ended)]
        return list({keys[e.episode]: e for e in ends if e.outcome != "abandoned"}.items())

    def by_task(self) -> dict[str, Ended]:
        """Return the settled runs by their task; one run a task."""
        return {key.task: finished for key, finished in self.settled()}

    async def until_settled(self, count: int) -> None:
        """Wait until so many runs are settled."""
        await until(lambda: len(self.settled()) >= count)


async def ended(process: asyncio.subprocess.Process) -> Outcome:
    """Return how a process ended, once it has."""
    out, errors = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    text = out.decode()
    summary = json.loads(text) if text.startswith("{") else {"text": text} if text else {}
    return Outcome(process.returncode, summary, errors.decode())
