"""Define `pawl rollout`, which runs an agent on a file of tasks, and tells the proxy how it did."""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from pawl.commands.common import fail
from pawl.settings import read_settings

if TYPE_CHECKING:
    from pawl.rollout.options import RolloutOptions
    from store.records import Split

Tasks = Annotated[
    Path | None, typer.Option(help="File of tasks, one JSON object a line; `id` names a task.")
]
Command = Annotated[
    str | None,
    typer.Option(
        help="Program to start once for each run, with its arguments, quoted as in a shell."
    ),
]
Python = Annotated[
    str | None,
    typer.Option(
        help="MODULE:FUNCTION to import once and call for each run, instead of --command."
    ),
]
Interpreter = Annotated[
    str | None,
    typer.Option(
        help="Python (3.11 or newer) that runs the function of --python, where its packages are "
        "not installed beside Pawl; default: Pawl's own."
    ),
]
Samples = Annotated[
    int, typer.Option("--samples", "-n", min=1, help="Runs of each task: the size of its group.")
]
AtOnce = Annotated[int, typer.Option("--at-once", "-k", min=1, help="Runs at the same time.")]
Timeout = Annotated[float, typer.Option(min=0.01, help="Time limit of one run, in seconds.")]
Judge = Annotated[
    str | None,
    typer.Option(
        help="Program that scores a run: task and output as JSON on its standard input, a number "
        "or an object of metrics on its standard output."
    ),
]
JudgePython = Annotated[
    str | None,
    typer.Option(
        "--judge-python",
        help="MODULE:FUNCTION that is imported once and called for each run, instead of --judge.",
    ),
]
JudgeTimeout = Annotated[
    float, typer.Option(min=0.01, help="Time limit of one judgement, in seconds.")
]
Answer = Annotated[
    str | None,
    typer.Option(
        help="Field of the tasks that the last line of the output is compared with; the reward "
        "is 1 or 0. The agent does not get this field."
    ),
]
Hide = Annotated[
    list[str] | None,
    typer.Option(
        help="Field of the tasks that the agent does not get, and the judge does; give it again "
        "for more of them."
    ),
]
SplitOption = Annotated[
    str | None,
    typer.Option("--split", help="`eval`: the episodes are never trained on. Or `train`."),
]
Policy = Annotated[
    str | None,
    typer.Option(help="Policy, or version NAME@N, that the agent is told to ask for."),
]
EveryVersion = Annotated[
    bool,
    typer.Option(
        "--every-version",
        help="Run the tasks on each version of --policy that is loaded, as an evaluation.",
    ),
]
Url = Annotated[
    str | None, typer.Option(help="The proxy's address; default: http:// and PAWL_LISTEN.")
]
Journal = Annotated[
    Path | None,
    typer.Option(
        help="File in which runs are written down, and from which a rollout goes on; default: the "
        "name of --tasks with `.rollout.jsonl`, in the working folder."
    ),
]
Again = Annotated[
    bool,
    typer.Option("--again", help="Run again what failed, or what the judge failed on, before."),
]
Summary = Annotated[Path | None, typer.Option(help="File to write the summary to, as JSON.")]


def rollout(
    tasks: Tasks = None,
    command: Command = None,
    python: Python = None,
    interpreter: Interpreter = None,
    samples: Samples = 1,
    at_once: AtOnce = 16,
    timeout: Timeout = 600.0,
    judge: Judge = None,
    judge_python: JudgePython = None,
    judge_timeout: JudgeTimeout = 60.0,
    answer: Answer = None,
    hide: Hide = None,
    split: SplitOption = None,
    policy: Policy = None,
    every_version: EveryVersion = False,
    url: Url = None,
    journal: Journal = None,
    again: Again = False,
    summary: Summary = None,
) -> None:
    """Run an agent on a file of tasks, and post rewards for what comes out.

    The agent is any program (--command) or Python function (--python). It gets its task on
    standard input, and OPENAI_BASE_URL and ANTHROPIC_BASE_URL, which name task, episode and
    split. A run that fails or takes too long gets no reward, but the metric run_failed. The same
    command goes on where it was stopped or killed. Needs a proxy, and no database.

    The first Ctrl-C lets runs end that are under way, the second gives them up. The summary is
    printed as JSON to anything but a terminal.

    Status 1: some runs failed or could not be judged. Status 2: the rollout cannot run like
    this. Status 130: Ctrl-C.
    """
    from pawl.rollout.errors import RolloutError
    from pawl.rollout.options import RolloutOptions, base_address
    from proxy.settings import ProxySettings

    settings = read_settings(ProxySettings)
    if tasks is None:
        fail("say with --tasks which file of tasks to run, one JSON object a line")
    try:
        address = base_address(url or f"http://{settings.listen}")
        options = RolloutOptions(
            tasks=tasks,
            url=address,
            metrics_url=_metrics_url(address, settings.admin_listen),
            command=command,
            python=python,
            interpreter=interpreter,
            samples=samples,
            at_once=at_once,
            limit_s=timeout,
            judge=judge,
            judge_python=judge_python,
            judge_limit_s=judge_timeout,
            answer=answer,
            hide=tuple(hide or ()),
            split=_split(split),
            policy=policy,
            every_version=every_version,
            journal=journal,
            again=again,
            summary=summary,
        )
        _report(_run(options))
    except RolloutError as error:
        fail(str(error))


def _run(options: "RolloutOptions") -> dict[str, Any]:
    from pawl.rollout.command import run_rollout

    return asyncio.run(run_rollout(options))


def _split(name: str | None) -> "Split | None":
    from pawl.rollout.errors import RolloutError

    match name:
        case None | "train" | "eval":
            return name
    raise RolloutError(f"--split is train or eval, not {name!r}")


def _metrics_url(address: str, admin_listen: str) -> str:
    """Return where the proxy's metrics are: on its host, at the port of PAWL_ADMIN_LISTEN."""
    host = urlsplit(address).hostname or ""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{admin_listen.rpartition(':')[2]}/metrics"


def _report(summary: dict[str, Any]) -> None:
    """Print the summary, and set the exit status."""
    if summary["hint"]:
        print(f"pawl: {summary['hint']}", file=sys.stderr)
    if sys.stdout.isatty():
        print(_words(summary))
    else:
        print(json.dumps(summary))
    if not summary["complete"] or summary["untold"]:
        raise SystemExit(130)
    if summary["failed"] or summary["unjudged"] or summary["refused"]:
        raise SystemExit(1)


def _words(summary: dict[str, Any]) -> str:
    reward = "no rewards" if summary["reward"] is None else f"mean reward {summary['reward']:.3f}"
    done = f"{summary['runs']} of {summary['planned']} runs, {summary['failed']} failed, {reward}"
    is_whole = summary["complete"] and not summary["untold"]
    ending = "" if is_whole else "; the same command goes on"
    return f"{done}{ending}. What each run did is in {summary['journal']}"
