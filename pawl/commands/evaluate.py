"""`pawl evaluate`: compare two versions on held-out tasks."""

import asyncio
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import msgspec
import typer
from pydantic import ValidationError
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from controller.comparison import ArmFigures, Figures
from pawl.commands.common import check_parent_folder, fail, with_flags
from pawl.commands.rollout import AgentFlags, Display, stopped_by_signals
from pawl.operator_moves import split_name
from pawl.rollout.evaluation import (
    EvaluationJob,
    EvaluationReport,
    Failure,
    Outcome,
    Pairs,
    evaluate,
)
from pawl.rollout.proxy import Models, ProxyClient
from pawl.rollout.running import Rollout
from pawl.rollout.tasks import RolloutError
from store.files import atomic_file
from store.limited_bodies import LimitedResponse
from trainer.recipes.recipe import PublishOptions

EXIT_STATUS: Final[dict[Outcome, int]] = {"better": 0, "worse": 1, "undecided": 3, "stopped": 130}
MOST_FAILURES: Final = 20
ALL: Final = "all tasks"
INTERVAL_NOTE: Final = "The interval holds at every look, with 95 % at each end"


class EvaluateFlags(AgentFlags, frozen=True, kw_only=True):
    """The arguments of `pawl evaluate`."""

    policy: Annotated[
        str | None,
        typer.Argument(
            metavar="POLICY[@N]",
            help="Policy and version to evaluate; without @N the newest that is loaded. May be "
            "left out with --python, if the proxy has one policy.",
            show_default=False,
        ),
    ] = None
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After `--`: program that is started for each run."),
    ] = None
    against: Annotated[
        str | None,
        typer.Option(
            metavar="@M",
            help="Version to compare with; default: the one that serves, or the base model, @0, "
            "if that is what is evaluated.",
        ),
    ] = None
    tries: Annotated[int, typer.Option(min=1, help="Runs of each task with each version.")] = 4
    most_runs: Annotated[
        int, typer.Option(min=1, help="Runs of both versions after which it ends undecided.")
    ] = 2000
    margin: Annotated[
        float,
        typer.Option(help="How much lower the version may score and still be no worse."),
    ] = 0.05
    reward_range: Annotated[
        tuple[float, float],
        typer.Option(
            "--range", metavar="LOW HIGH", help="Lowest and highest reward; others are clipped."
        ),
    ] = (0.0, 1.0)
    seed: Annotated[int, typer.Option(help="Random seed of the order of the tasks.")] = 0
    journal: Annotated[
        Path | None,
        typer.Option(
            help="Journal of the runs, from which the same command resumes; "
            "default: the names of --tasks and of both versions with `.evaluation.jsonl`, in the "
            "working folder."
        ),
    ] = None
    picture: Annotated[
        Path | None,
        typer.Option(help="PNG to draw the result in; needs matplotlib (the extra `demo`)."),
    ] = None
    json: Annotated[Path | None, typer.Option(help="File to write the result in as JSON.")] = None


@with_flags(EvaluateFlags)
def evaluate_command(flags: EvaluateFlags) -> None:
    """Show whether a version is better than another: both run an agent on the same held-out tasks.

    `pawl evaluate POLICY@N --against @M --tasks FILE --answer FIELD -- PROGRAM ARGUMENTS`. The
    agent is as for `pawl rollout`; its episodes are never trained on. Each task is a pair, the
    tasks come in random order, and it stops as soon as the difference is shown: the version is
    worse, or no worse by the margin. The interval stays valid however often it is checked. The same
    command goes on where it was stopped or killed. Needs a proxy, and no database.

    Status 0: the version is better or no worse. Status 1: it is worse. Status 3: undecided when
    the tasks or --most-runs were used up. Status 2: the evaluation cannot run like this. Status
    130: Ctrl-C.
    """
    for option, path in (("--json", flags.json), ("--picture", flags.picture)):
        check_parent_folder(option, path)
    # Checked before the work, not after it.
    if flags.picture is not None and importlib.util.find_spec("matplotlib") is None:
        fail("--picture needs matplotlib: install Pawl's extra `demo`, or leave it")
    try:
        evaluation = asyncio.run(run_evaluation(flags))
    except RolloutError as error:
        fail(str(error))
    Console().print(render_report(evaluation))
    if flags.json is not None:
        with atomic_file(flags.json) as file:
            file.write(msgspec.json.format(msgspec.json.encode(evaluation)) + b"\n")
    if flags.picture is not None:
        draw_report(flags.picture, evaluation)
    raise SystemExit(EXIT_STATUS[evaluation.outcome])


async def run_evaluation(flags: EvaluateFlags) -> EvaluationReport:
    """Do the runs that are not in the journal yet, and return the result of all.

    Raises:
        RolloutError: the options cannot be used, or the evaluation could not go on.
    """
    try:
        rule = PublishOptions(margin=flags.margin, reward_range=flags.reward_range)
    except ValidationError as error:
        [first, *_] = error.errors()
        why = ": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])
        raise RolloutError(f"--margin, --range: {why}") from error
    setup = flags.setup(flags.command, lambda tasks: flags.journal or tasks)
    async with aiohttp.ClientSession(
        headers=setup.headers, response_class=LimitedResponse
    ) as session:
        models = await ProxyClient(session, setup.url).models()
    new, old = versions_to_compare(models, flags.policy, flags.against)
    if flags.journal is None:
        name = f"{setup.tasks.stem}.{new}-{old.rpartition('@')[2]}.evaluation.jsonl"
        setup = msgspec.structs.replace(setup, journal=Path(name.replace("/", "-")))
    job = EvaluationJob(
        setup=setup,
        new=new,
        old=old,
        rule=rule,
        tries=flags.tries,
        most_runs=flags.most_runs,
        seed=flags.seed,
    )

    async def show(rollout: Rollout, pairs: Pairs) -> None:
        with stopped_by_signals(rollout):
            await EvaluationDisplay(rollout, pairs, Console(stderr=True)).show()

    return (await evaluate(job, show=show)).report()


def versions_to_compare(models: Models, policy: str | None, against: str | None) -> tuple[str, str]:
    """Return the names, NAME@N, of the version to evaluate and the version to compare it with.

    Raises:
        RolloutError: no policy is named and there are several, or the names are wrong.
    """
    if policy is None:
        if len(models.serving) != 1:
            known = ", ".join(models.serving) or "none"
            raise RolloutError(f"say which policy to evaluate; the proxy serves {known}")
        policy = models.serving[0].rpartition("@")[0]
    name, number = split_name(policy)
    of_policy = re.compile(re.escape(name) + r"@(\d+)")
    loaded = [int(match[1]) for one in models.names if (match := of_policy.fullmatch(one))]
    serving = [int(match[1]) for one in models.serving if (match := of_policy.fullmatch(one))]
    if number is None:
        if not loaded:
            known = ", ".join(sorted(models.names)) or "none"
            raise RolloutError(f"no version of {name!r} is loaded; the proxy's models are {known}")
        number = max(loaded)
    if against is not None:
        other_name, other = split_name(against if "@" in against else f"@{against}")
        if other is None or other_name not in ("", name):
            raise RolloutError(f"--against {against}: write a version of {name}, such as @0")
    elif serving and serving[0] != number:
        other = serving[0]
    else:
        other = 0
    if other == number:
        raise RolloutError(f"{name}@{number} would be compared with itself: name another version")
    return f"{name}@{number}", f"{name}@{other}"


class EvaluationDisplay(Display):
    """Show a running evaluation: how many tasks are compared, and the difference so far."""

    def __init__(self, rollout: Rollout, pairs: Pairs, console: Console) -> None:
        super().__init__(rollout, console)
        self._pairs = pairs

    def cells(self) -> dict[str, str]:
        cells, comparison = super().cells(), self._pairs.comparison
        del cells["reward"]
        seconds = cells.pop("seconds")
        figures = comparison.figures()
        return {
            "tasks": f"{self._pairs.tasks}/{self._pairs.planned}",
            **cells,
            "difference": _format_signed(comparison.difference),
            "interval": _format_interval(figures),
            "seconds": seconds,
        }


def render_report(evaluation: EvaluationReport) -> Group:
    """Return the result as a table and in words."""
    return Group(
        Text(f"{evaluation.new} against {evaluation.old}"),
        _table(evaluation),
        Text(f"{INTERVAL_NOTE}. {_describe_counts(evaluation)}", style="dim"),
        *_guard_lines(evaluation.figures),
        *_failure_lines(evaluation.failures),
        Text(f"{evaluation.new}: {_headline(evaluation)}", style="bold").append(
            f" ({evaluation.reason})", style="not bold"
        ),
    )


def _headline(evaluation: EvaluationReport) -> str:
    """Return the outcome; `better` is shown as "no worse" unless the interval is above 0."""
    if evaluation.outcome == "better" and evaluation.figures.lower <= 0:
        return "no worse"
    return evaluation.outcome


def _table(evaluation: EvaluationReport) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("")
    sides = [f"@{one.rpartition('@')[2]}" for one in (evaluation.new, evaluation.old)]
    for name in ("tasks", *sides, "difference", "interval", "failed", "unscored"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [(one.name or "–", one.tasks, one.figures) for one in evaluation.families]
    if len(rows) == 1:
        rows = []
    for name, tasks, figures in [*rows, (ALL, evaluation.tasks, evaluation.figures)]:
        table.add_row(
            Text(name),
            str(tasks),
            _format_mean(figures.new),
            _format_mean(figures.old),
            _format_signed(figures.difference),
            _format_interval(figures),
            f"{figures.new.failed}/{figures.old.failed}",
            f"{figures.new.unscored}/{figures.old.unscored}",
            style="bold" if name is ALL else "",
        )
    return table


def _describe_counts(evaluation: EvaluationReport) -> str:
    seen, tries = evaluation.figures, evaluation.tries
    clipped = seen.new.clipped + seen.old.clipped
    times = "1 try" if tries == 1 else f"{tries} tries"
    parts = [
        f"{evaluation.tasks} of {evaluation.planned} tasks, {times} each",
        f"{evaluation.runs} runs",
        *([f"{clipped} rewards outside of --range"] if clipped else []),
    ]
    return "; ".join(parts)


def _guard_lines(figures: Figures) -> Iterator[Text]:
    for guard in figures.guards:
        if guard.new is not None and guard.old is not None and (guard.new or guard.old):
            yield Text(f"{guard.name}: {guard.new:.1%} against {guard.old:.1%}", style="dim")


def _failure_lines(failures: Iterable[Failure]) -> Iterator[Text]:
    failures = list(failures)
    if failures:
        yield Text("The agent failed:", style="red")
    for one in failures[:MOST_FAILURES]:
        times = "1 run" if one.runs == 1 else f"{one.runs} runs"
        yield Text(f"  {one.task} with {one.version}: {one.error} ({times})", style="red")
    if len(failures) > MOST_FAILURES:
        yield Text(f"  and {len(failures) - MOST_FAILURES} more (--json has all)", style="red")


def _format_mean(arm: ArmFigures) -> str:
    return "–" if arm.mean is None else f"{arm.mean:.3f}"


def _format_signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}".replace("-", "−")


def _format_interval(figures: Figures) -> str:
    if figures.difference is None:
        return "–"
    return f"{_format_signed(figures.lower)} … {_format_signed(figures.upper)}"


INK_COLOR: Final = "#1f2933"
NEW_COLOR: Final = "#0b7285"
OLD_COLOR: Final = "#adb5bd"
HARM_COLOR: Final = "#e8590c"


def draw_report(path: Path, evaluation: EvaluationReport) -> None:
    """Draw the difference with its interval over the tasks, and the means by family."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 3.8), dpi=150, gridspec_kw={"width_ratios": [3, 2]}
    )
    _plot_looks(left, evaluation)
    _plot_families(right, evaluation)
    for axes in (left, right):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.tight_layout()
    with atomic_file(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or None)
    plt.close(figure)


def _plot_looks(axes: Any, evaluation: EvaluationReport) -> None:
    looks = evaluation.looks
    tasks = [look.tasks for look in looks]
    axes.axhline(0, color=INK_COLOR, linewidth=0.8)
    axes.axhline(-evaluation.margin, color=HARM_COLOR, linewidth=0.8, linestyle="--")
    axes.annotate(
        "margin",
        (1, -evaluation.margin),
        xycoords=("axes fraction", "data"),
        color=HARM_COLOR,
        fontsize=8,
        ha="right",
        va="top",
    )
    band = [look.lower for look in looks], [look.upper for look in looks]
    axes.fill_between(
        tasks, *band, color=NEW_COLOR, alpha=0.18, linewidth=0, label="95 % at each end, every look"
    )
    axes.plot(tasks, [look.difference for look in looks], color=NEW_COLOR, linewidth=2)
    axes.set_xlabel("tasks")
    axes.set_ylabel("difference of the mean reward")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="lower right")
    title = f"{evaluation.new} against {evaluation.old}: {_headline(evaluation)}"
    axes.set_title(title, loc="left", fontweight="bold", color=INK_COLOR, fontsize=10)


def _plot_families(axes: Any, evaluation: EvaluationReport) -> None:
    rows = [(one.name or "–", one.figures) for one in evaluation.families]
    rows = [*(rows if len(rows) > 1 else []), (ALL, evaluation.figures)]
    for place, (_, figures) in enumerate(reversed(rows)):
        means = [figures.old.mean, figures.new.mean]
        known = [mean for mean in means if mean is not None]
        axes.plot(known, [place] * len(known), color=OLD_COLOR, linewidth=2, zorder=1)
        for mean, color in zip(means, (OLD_COLOR, NEW_COLOR), strict=True):
            if mean is not None:
                axes.scatter([mean], [place], color=color, s=45, zorder=2)
    axes.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("mean reward")
    for name, color in ((evaluation.old, OLD_COLOR), (evaluation.new, NEW_COLOR)):
        axes.scatter([], [], color=color, s=45, label=name)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8)
