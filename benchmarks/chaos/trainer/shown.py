"""Show how far the runs of a comparison are: bars on standard error."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.chaos.trainer.lives import Run
from benchmarks.repeating import repeating

LOOK_S: Final = 0.5


@contextmanager
def showing(runs: Sequence[Run], title: str) -> Iterator[None]:
    """Show the updates made and the trainers killed for the length of the block."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("updates, {task.fields[kills]} kills of the trainer"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        wanted = [run.place.updates * len(run.place.names) for run in runs]
        tasks = [
            progress.add_task(f"{title}: {', '.join(run.place.names)}", total=total, kills=0)
            for run, total in zip(runs, wanted, strict=True)
        ]

        def look() -> None:
            for task, run, total in zip(tasks, runs, wanted, strict=True):
                made = round(run.place.progress() * total)
                progress.update(task, completed=made, kills=run.lives.killed.total())

        try:
            with repeating(look, LOOK_S):
                yield
        finally:
            look()
