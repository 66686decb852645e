"""`pawl rollout`: run an agent on a file of tasks, and post its rewards."""

import asyncio
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pawl.commands.common import fail, with_flags
from pawl.rollout.journal import RolloutPlan
from pawl.rollout.running import Rollout
from pawl.rollout.setup import Setup
from pawl.rollout.tasks import RolloutError, tasks_digest
from pawl.settings import ClientSettings, read_settings
from store.records import Record, Split

REFRESH_S: Final = 0.5
LINE_S: Final = 10.0
MAX_ERRORS: Final = 6


class AgentFlags(Record, frozen=True, kw_only=True):
    """The options shared by all commands that run an agent on tasks."""

    tasks: Annotated[
        Path | None, typer.Option(help="File of tasks, one JSON object a line; `id` names a task.")
    ] = None
    python: Annotated[
        str | None,
        typer.Option(help="MODULE:FUNCTION that is called for each run, instead of a program."),
    ] = None
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
            help="Field of the tasks that the agent does not get, and the judge does; may be given "
            "several times."
        ),
    ] = None
    url: Annotated[
        str | None, typer.Option(help="The proxy's address; default: http:// and PAWL_LISTEN.")
    ] = None

    def setup(self, program: Sequence[str] | None, journal: Callable[[Path], Path]) -> Setup:
        """Return the setup of these options; `journal` maps the file of tasks to the journal's.

        Raises:
            RolloutError: there is no file of tasks, or the URL is invalid.
        """
        if self.tasks is None:
            raise RolloutError(
                "say with --tasks which file of tasks to run, one JSON object a line"
            )
        return Setup(
            tasks=self.tasks,
            journal=journal(self.tasks),
            url=proxy_address(self.url),
            headers=read_settings(ClientSettings).headers,
            command=shlex.join(program) if program else None,
            python=self.python,
            judge=self.judge,
            answer=self.answer,
            hide=tuple(self.hide or ()),
            limit_s=self.timeout,
            at_once=self.at_once,
        )


class RolloutFlags(AgentFlags, frozen=True, kw_only=True):
    """The arguments of `pawl rollout`."""

    command: Annotated[
        list[str] | None,
        typer.Argument(help="After `--`: program that is started for each run."),
    ] = None
    samples: Annotated[
        int,
        typer.Option("--samples", "-n", min=1, help="Runs of each task: the size of its group."),
    ] = 1
    split: Annotated[
        str | None,
        typer.Option(help="`eval`: the episodes are never trained on. Or `train`."),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(help="Policy, or version NAME@N, that the agent is told to ask for."),
    ] = None
    journal: Annotated[
        Path | None,
        typer.Option(
            help="Journal of the runs, from which the same command resumes; default: "
            "the name of --tasks with `.rollout.jsonl`, in the working folder."
        ),
    ] = None
    again: Annotated[
        bool,
        typer.Option("--again", help="Run again what failed, or what the judge failed on, before."),
    ] = False


@with_flags(RolloutFlags)
def rollout(flags: RolloutFlags) -> None:
    """Run an agent on a file of tasks, and post rewards for what comes out.

    `pawl rollout --tasks FILE --answer FIELD -- PROGRAM ARGUMENTS`. The agent is any program (after
    `--`) or Python function (--python). It gets its task on
    standard input, and OPENAI_BASE_URL and ANTHROPIC_BASE_URL, which name task, episode and
    split. A run that fails or takes too long gets no reward, but the metric run_failed. The same
    command goes on where it was stopped or killed. Needs a proxy, and no database.

    The first Ctrl-C lets runs end that are under way, the second gives them up. The summary is
    printed as JSON to anything but a terminal.

    Status 1: some runs failed or could not be judged. Status 2: the rollout cannot run like
    this. Status 130: Ctrl-C.
    """
    try:
        summary = asyncio.run(run_rollout(flags))
    except RolloutError as error:
        fail(str(error))
    if summary["hint"]:
        print(f"pawl: {summary['hint']}", file=sys.stderr)
    print(_describe_summary(summary) if sys.stdout.isatty() else json.dumps(summary))
    if _is_unfinished(summary):
        raise SystemExit(130)
    if summary["failed"] or summary["unjudged"] or "feedback refused" in summary["errors"]:
        raise SystemExit(1)


async def run_rollout(flags: RolloutFlags) -> dict[str, Any]:
    """Do the runs that are not in the journal yet, and return the summary of all.

    Raises:
        RolloutError: the options cannot be used, or the rollout could not go on.
    """
    started = time.monotonic()
    setup = flags.setup(
        flags.command,
        lambda tasks: flags.journal or Path(tasks.name).with_suffix(".rollout.jsonl"),
    )
    tasks = setup.read_tasks()
    plan = RolloutPlan(
        tasks=tasks_digest(tasks),
        samples=flags.samples,
        agent=setup.agent_name,
        judge=setup.judge_name,
        split=_checked_split(flags),
        policy=flags.policy or "",
        hidden=tuple(sorted(set(setup.hide))),
    )
    async with setup.rollout(tasks, plan, again=flags.again) as run:
        showing = asyncio.create_task(Display(run, Console(stderr=True)).show())
        try:
            with stopped_by_signals(run):
                await run.run()
        finally:
            showing.cancel()
            await asyncio.wait([showing])
        return run.figures.summary() | {
            "unposted": len(run.unposted),
            "journal": str(setup.journal),
            "seconds": round(time.monotonic() - started, 1),
            "hint": run.hint,
        }


class Display:
    """Show a rollout's progress: a table on a terminal, else a line every LINE_S seconds."""

    def __init__(self, rollout: Rollout, console: Console) -> None:
        self._rollout = rollout
        self._figures = rollout.figures
        self._console = console
        self._started = time.monotonic()

    async def show(self) -> None:
        """Show the rollout until the task is cancelled."""
        if not self._console.is_terminal:
            while True:
                await asyncio.sleep(LINE_S)
                words = [f"{name} {value}" for name, value in self.cells().items()]
                line = "  ".join([*words, self._rollout.trouble]).rstrip()
                self._console.print(line, highlight=False, soft_wrap=True)
        with Live(self._table(), console=self._console, auto_refresh=False) as live:
            try:
                while True:
                    await asyncio.sleep(REFRESH_S)
                    live.update(self._table(), refresh=True)
            finally:
                live.update(self._table(), refresh=True)

    def cells(self) -> dict[str, str]:
        """Return the figures to show, by name."""
        reward = self._figures.reward
        return {
            "runs": f"{self._figures.runs}/{self._figures.planned}",
            "under way": str(self._rollout.under_way),
            "failed": str(self._figures.outcomes["failed"]),
            "reward": "–" if reward is None else f"{reward:.3f}",
            "seconds": f"{time.monotonic() - self._started:.0f}",
        }

    def _table(self) -> Group:
        head = Table(*self.cells(), box=None, header_style="dim")
        head.add_row(*self.cells().values())
        errors = [
            Text(f"{count:6}  {kind}", style="red")
            for kind, count in self._figures.errors.most_common(MAX_ERRORS)
        ]
        return Group(head, *errors, Text(self._rollout.trouble, style="yellow"))


@contextmanager
def stopped_by_signals(rollout: Rollout) -> Iterator[None]:
    """Stop on Ctrl-C; give up the runs under way on a second Ctrl-C, or on SIGTERM."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, rollout.stop)
    loop.add_signal_handler(signal.SIGTERM, rollout.give_up)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)


def _checked_split(flags: RolloutFlags) -> Split | None:
    match flags.split:
        case None | "train" | "eval":
            return flags.split
    raise RolloutError(f"--split is train or eval, not {flags.split!r}")


def proxy_address(url: str | None) -> str:
    """Return the proxy's URL (default: http:// and PAWL_LISTEN) without a final slash or `/v1`.

    Raises:
        RolloutError: the URL cannot be used.
    """
    from proxy.settings import ProxySettings

    url = url or f"http://{read_settings(ProxySettings).listen}"
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise RolloutError(
            f"--url: {url!r} is no http:// or https:// URL: give the address that `pawl proxy` or "
            "`pawl up` prints"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _describe_summary(summary: dict[str, Any]) -> str:
    reward = "no rewards" if summary["reward"] is None else f"mean reward {summary['reward']:.3f}"
    done = f"{summary['runs']} of {summary['planned']} runs, {summary['failed']} failed, {reward}"
    ending = "; the same command goes on" if _is_unfinished(summary) else ""
    return f"{done}{ending}. What each run did is in {summary['journal']}"


def _is_unfinished(summary: dict[str, Any]) -> bool:
    return bool(summary["runs"] < summary["planned"] or summary["unposted"])
