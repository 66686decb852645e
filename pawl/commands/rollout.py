"""Define `pawl rollout`, which runs an agent on a file of tasks, and tells the proxy how it did."""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from pawl.commands.common import a_tenant, fail
from pawl.commands.flags import takes
from pawl.settings import ClientSettings, read_settings
from store.records import Record, Split

if TYPE_CHECKING:
    from pawl.rollout.options import RolloutOptions
    from proxy.settings import ProxySettings


class RolloutFlags(Record, frozen=True, kw_only=True):
    """Hold what may be written after `pawl rollout`."""

    tasks: Annotated[
        Path | None, typer.Option(help="File of tasks, one JSON object a line; `id` names a task.")
    ] = None
    command: Annotated[
        str | None,
        typer.Option(
            help="Program to start once for each run, with its arguments, quoted as in a shell."
        ),
    ] = None
    python: Annotated[
        str | None,
        typer.Option(
            help="MODULE:FUNCTION to import once and call for each run, instead of --command."
        ),
    ] = None
    interpreter: Annotated[
        str | None,
        typer.Option(
            help="Python (3.11 or newer) that runs the function of --python, where its packages "
            "are not installed beside Pawl; default: Pawl's own."
        ),
    ] = None
    samples: Annotated[
        int,
        typer.Option("--samples", "-n", min=1, help="Runs of each task: the size of its group."),
    ] = 1
    at_once: Annotated[
        int, typer.Option("--at-once", "-k", min=1, help="Runs at the same time.")
    ] = 16
    timeout: Annotated[float, typer.Option(min=0.01, help="Time limit of one run, in seconds.")] = (
        600.0
    )
    judge: Annotated[
        str | None,
        typer.Option(
            help="Program that scores a run: task and output as JSON on its standard input, a "
            "number or an object of metrics on its standard output."
        ),
    ] = None
    judge_python: Annotated[
        str | None,
        typer.Option(
            "--judge-python",
            help="MODULE:FUNCTION that is imported once and called for each run, instead of "
            "--judge.",
        ),
    ] = None
    judge_timeout: Annotated[
        float, typer.Option(min=0.01, help="Time limit of one judgement, in seconds.")
    ] = 60.0
    answer: Annotated[
        str | None,
        typer.Option(
            help="Field of the tasks that the last line of the output is compared with; the reward "
            "is 1 or 0. The agent does not get this field."
        ),
    ] = None
    hide: Annotated[
        list[str] | None,
        typer.Option(
            help="Field of the tasks that the agent does not get, and the judge does; give it "
            "again for more of them."
        ),
    ] = None
    split: Annotated[
        str | None,
        typer.Option("--split", help="`eval`: the episodes are never trained on. Or `train`."),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(help="Policy, or version NAME@N, that the agent is told to ask for."),
    ] = None
    every_version: Annotated[
        bool,
        typer.Option(
            "--every-version",
            help="Run the tasks on each version of --policy that is loaded, as an evaluation.",
        ),
    ] = False
    tenant: Annotated[
        str | None,
        typer.Option(
            callback=a_tenant,
            help="Tenant that PAWL_API_KEY must belong to; default: any.",
        ),
    ] = None
    url: Annotated[
        str | None, typer.Option(help="The proxy's address; default: http:// and PAWL_LISTEN.")
    ] = None
    journal: Annotated[
        Path | None,
        typer.Option(
            help="File in which runs are written down, and from which a rollout goes on; default: "
            "the name of --tasks with `.rollout.jsonl`, in the working folder."
        ),
    ] = None
    again: Annotated[
        bool,
        typer.Option("--again", help="Run again what failed, or what the judge failed on, before."),
    ] = False
    summary: Annotated[Path | None, typer.Option(help="File to write the summary to, as JSON.")] = (
        None
    )


@takes(RolloutFlags)
def rollout(flags: RolloutFlags) -> None:
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
    from proxy.settings import ProxySettings

    settings = read_settings(ProxySettings)
    if flags.tasks is None:
        fail("say with --tasks which file of tasks to run, one JSON object a line")
    try:
        _report(_run(_options(flags, flags.tasks, settings)))
    except RolloutError as error:
        fail(str(error))


def _options(flags: RolloutFlags, tasks: Path, settings: "ProxySettings") -> "RolloutOptions":
    from pawl.rollout.options import RolloutOptions, base_address

    url = base_address(flags.url or f"http://{settings.listen}")
    return RolloutOptions(
        tasks=tasks,
        url=url,
        metrics_url=_metrics_url(url, settings.admin_listen),
        command=flags.command,
        python=flags.python,
        interpreter=flags.interpreter,
        samples=flags.samples,
        at_once=flags.at_once,
        limit_s=flags.timeout,
        judge=flags.judge,
        judge_python=flags.judge_python,
        judge_limit_s=flags.judge_timeout,
        answer=flags.answer,
        hide=tuple(flags.hide or ()),
        split=_split(flags.split),
        policy=flags.policy,
        every_version=flags.every_version,
        journal=flags.journal,
        again=flags.again,
        summary=flags.summary,
        key=read_settings(ClientSettings).headers,
        tenant=flags.tenant,
    )


def _run(options: "RolloutOptions") -> dict[str, Any]:
    from pawl.rollout.command import run_rollout

    return asyncio.run(run_rollout(options))


def _split(name: str | None) -> Split | None:
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
