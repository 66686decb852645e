"""The example agent and its judge, run as the separate programs that they are."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pawl.demo.errors import DemoFailed

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"


def script(name: str) -> list[str]:
    """The command that runs one of the example's programs.

    Raises:
        DemoFailed: Pawl is not run from a checkout, which has the examples.
    """
    path = EXAMPLE / name
    if not path.exists():
        raise DemoFailed(f"{path} is missing: run the demo from a checkout of the repository")
    return [sys.executable, str(path)]


async def make_questions(count: int, seed: int, split: str, folder: Path) -> tuple[Path, Path]:
    """Files of questions for the agent, and of the same with answers for the judge."""
    plain, answered = folder / f"{split}.jsonl", folder / f"{split}-answers.jsonl"
    options = ["--count", str(count), "--seed", str(seed), "--split", split]
    plain.write_bytes(await run([*script("questions.py"), *options]))
    answered.write_bytes(await run([*script("questions.py"), *options, "--with-answers"]))
    return plain, answered


async def run(command: Sequence[str], environment: dict[str, str] | None = None) -> bytes:
    """A program's standard output.

    Raises:
        DemoFailed: it ended with an error.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        env=os.environ | (environment or {}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if process.returncode:
        raise DemoFailed(f"{Path(command[1]).name} failed: {err.decode(errors='replace')[-800:]}")
    return out


def client_environment(base_url: str, model: str) -> dict[str, str]:
    """All that an agent needs to be told: where to call, and for which model."""
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "unused", "OPENAI_MODEL": model}


class WorkingAgent:
    """The agent at work, fed with questions, and the judge that follows its results."""

    def __init__(
        self, base_url: str, feedback_url: str, model: str, answers: Path, folder: Path
    ) -> None:
        self.results_file = folder / "results.jsonl"
        self._environment = os.environ | client_environment(base_url, model)
        self._feedback_url = feedback_url
        self._answers = answers
        self._folder = folder
        self._read = 0
        self.results: list[dict[str, Any]] = []

    async def start(self, *, samples: int, concurrency: int) -> None:
        """Start both programs."""
        self._log = (self._folder / "agent.log").open("ab")
        self._agent = await asyncio.create_subprocess_exec(
            *script("agent.py"),
            *("-", "--out", str(self.results_file), "--samples", str(samples)),
            *("--concurrency", str(concurrency)),
            env=self._environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._judge = await asyncio.create_subprocess_exec(
            *script("judge.py"),
            *(str(self.results_file), "--answers", str(self._answers), "--follow"),
            *("--feedback-url", self._feedback_url),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    async def ask(self, lines: Sequence[str]) -> None:
        """Hand the agent some questions."""
        assert self._agent.stdin is not None
        self._agent.stdin.write("".join(line + "\n" for line in lines).encode())
        await self._agent.stdin.drain()

    def collect(self) -> list[dict[str, Any]]:
        """Results that came since the last look.

        Raises:
            DemoFailed: agent or judge is gone.
        """
        for name, process in (("agent", self._agent), ("judge", self._judge)):
            if process.returncode is not None:
                raise DemoFailed(
                    f"the {name} ended with code {process.returncode}: see {self._log.name}"
                )
        if not self.results_file.exists():
            return []
        with self.results_file.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        found = [json.loads(line) for line in whole.splitlines()]
        self.results += found
        return found

    async def stop(self) -> None:
        """End both: the agent first, so that the judge has seen all it did."""
        for process in (self._agent, self._judge):
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), 15)
                except TimeoutError:
                    process.kill()
                    await process.wait()
        self._log.close()


async def examine(
    base_url: str, model: str, questions: Path, answers: Path, out: Path, *, samples: int
) -> dict[str, Any]:
    """Ask the held-out questions and judge the answers without reporting them to anybody.

    Returns:
        The judge's summary: `success`, `well_formed`, `results`, `failed_calls`, …
    """
    out.unlink(missing_ok=True)
    command = [
        *script("agent.py"),
        *(str(questions), "--out", str(out), "--samples", str(samples)),
        *("--concurrency", "32"),
    ]
    await run(command, client_environment(base_url, model))
    judged = await run([*script("judge.py"), str(out), "--answers", str(answers)])
    summary: dict[str, Any] = json.loads(judged)
    return summary
