"""Run the example agent and its judge as separate programs, as a user would."""

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
    """Return the command that runs one of the example's programs.

    Raises:
        DemoFailed: the program is missing, because Pawl does not run from a checkout.
    """
    path = EXAMPLE / name
    if not path.exists():
        raise DemoFailed(f"{path} is missing: run the demo from a checkout of the repository")
    return [sys.executable, str(path)]


async def make_questions(count: int, seed: int, split: str, folder: Path) -> tuple[Path, Path]:
    """Write `count` questions to a file for the agent, and with answers to one for the judge.

    Args:
        count: number of questions.
        seed: random seed of the questions.
        split: `train` or `held-out`; no question is in both.
        folder: where the two files are written.

    Returns:
        The file of questions, and the file of the same questions with answers.

    Raises:
        DemoFailed: the example's program failed.
    """
    plain, answered = folder / f"{split}.jsonl", folder / f"{split}-answers.jsonl"
    options = ["--count", str(count), "--seed", str(seed), "--split", split]
    plain.write_bytes(await run([*script("questions.py"), *options]))
    answered.write_bytes(await run([*script("questions.py"), *options, "--with-answers"]))
    return plain, answered


async def run(command: Sequence[str], environment: dict[str, str] | None = None) -> bytes:
    """Run a program to its end, and return its standard output.

    Raises:
        DemoFailed: it ended with an error; the message has the end of its standard error.
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
    """Return the environment variables that point an OpenAI client at the proxy and the model."""
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "unused", "OPENAI_MODEL": model}


class WorkingAgent:
    """Give questions to a running example agent, and follow its results with the judge.

    Attributes:
        results_file: where the agent writes its results, one JSON line each.
        results: all results collected so far.
    """

    def __init__(
        self, base_url: str, feedback_url: str, model: str, answers: Path, folder: Path
    ) -> None:
        """Store where the agent calls, where the judge posts, and where files go.

        Args:
            base_url: the proxy's address, as agents get it.
            feedback_url: where the judge posts rewards.
            model: the model that the agent asks for.
            answers: the file of questions with answers, for the judge.
            folder: where results and logs are written.
        """
        self.results_file = folder / "results.jsonl"
        self._environment = os.environ | client_environment(base_url, model)
        self._feedback_url = feedback_url
        self._answers = answers
        self._folder = folder
        self._read = 0
        self.results: list[dict[str, Any]] = []

    async def start(self, *, samples: int, concurrency: int) -> None:
        """Start both programs; each question is asked `samples` times, `concurrency` at a time."""
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
        """Give questions to the agent, one JSON line each."""
        assert self._agent.stdin is not None
        self._agent.stdin.write("".join(line + "\n" for line in lines).encode())
        await self._agent.stdin.drain()

    def collect(self) -> list[dict[str, Any]]:
        """Return the results that were written since the last call.

        Raises:
            DemoFailed: the agent or the judge has ended.
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
        new = [json.loads(line) for line in whole.splitlines()]
        self.results += new
        return new

    async def stop(self) -> None:
        """Stop the agent first and then the judge, so that the judge sees all results."""
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
    base_url: str,
    feedback_url: str,
    model: str,
    questions: Path,
    answers: Path,
    out: Path,
    *,
    samples: int,
) -> dict[str, Any]:
    """Have the agent answer the held-out questions, and judge its answers: an evaluation.

    Args:
        base_url: the proxy's address for evaluation, as agents get it.
        feedback_url: where the judge posts rewards, which are those of the version that serves.
        model: the model that the agent asks for.
        questions: the file of questions.
        answers: the file of the same questions with answers.
        out: where the results are written; an old file is replaced.
        samples: how often each question is asked.

    Returns:
        The judge's summary: `success`, `well_formed`, `results`, `failed_calls`, …

    Raises:
        DemoFailed: the agent or the judge failed.
    """
    out.unlink(missing_ok=True)
    command = [
        *script("agent.py"),
        *(str(questions), "--out", str(out), "--samples", str(samples)),
        *("--concurrency", "32"),
    ]
    await run(command, client_environment(base_url, model))
    judge = [*script("judge.py"), str(out), "--answers", str(answers)]
    judged = await run([*judge, "--feedback-url", feedback_url])
    summary: dict[str, Any] = json.loads(judged)
    return summary
