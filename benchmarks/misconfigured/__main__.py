"""Run `python -m benchmarks.misconfigured`: six misconfigurations, made and repaired.

A rank that the server refuses, layers it has no LoRA in, raw log-probabilities, another base model,
full memory, a server that is away: each is there at the start, and each is made while a real
`pawl trainer` learns, with the recipe `rollout` and the product's own pauses. The model server
computes over a tiny model, and is changed in place, so that nothing but its answers tells. Once the
trainer holds, or has ended, the fault lasts a while longer, in which agents go on working, and is
then repaired; a trainer that has ended is started again.

Printed: episodes spent in vain, until it has learned again, what the operator was told, and the
seconds from the repair to the next version that serves. Ends with status 1 where a bar is missed:
none spent at the start, two updates' (256) in all while it runs, the remedy told, 60 s.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import structlog
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.chaos.trainer.database import Database
from benchmarks.chaos.trainer.stage import write_model
from benchmarks.misconfigured.faults import FAULTS, MOMENTS, Fault, Moment
from benchmarks.misconfigured.scenario import Outcome, Scenario
from store.embedded.server import EmbeddedPostgres

# Of the models' weights: enough for two random models to say different things.
SPREAD = 0.4
SHOWN = 110
COLUMNS = (
    *(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")),
)


def main() -> None:
    """Parse, run, print."""
    options = _options()
    # Migrations are told there, and are no part of the result.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    faults = [one for one in FAULTS if options.fault in (None, one.name)]
    moments = [one for one in MOMENTS if options.moment in (None, one)]
    with tempfile.TemporaryDirectory(prefix="pawl-misconfigured-") as folder:
        outcomes = measured(Path(folder), faults, moments)
    Console(stderr=options.json).print(_table(outcomes))
    if options.json:
        print(json.dumps([one._asdict() | {"missed": one.missed} for one in outcomes]))
    sys.exit(1 if any(one.missed for one in outcomes) else 0)


def measured(folder: Path, faults: Sequence[Fault], moments: Sequence[Moment]) -> list[Outcome]:
    """Run each of `faults` at each of `moments`, one after the other."""
    # A tiny model gains nothing from a second thread, and waits for it where others compute.
    torch.set_num_threads(1)
    models = folder / "right", folder / "wrong"
    for seed, model in enumerate(models):
        write_model(model, seed, SPREAD)
    postgres = EmbeddedPostgres(folder)
    postgres.ensure_running()
    database, outcomes = Database(postgres), []
    pairs = [(fault, moment) for moment in moments for fault in faults]
    try:
        with Progress(*COLUMNS, console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=len(pairs))
            for number, (fault, moment) in enumerate(pairs):
                progress.update(task, description=f"{fault.name}, {moment}")
                scenario = Scenario(
                    folder / str(number), database.create(f"misconfigured_{number}"), *models
                )
                outcomes.append(asyncio.run(scenario.run(fault, moment)))
                progress.advance(task)
    finally:
        postgres.stop()
    return outcomes


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.misconfigured", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--fault", choices=[one.name for one in FAULTS], help="only this one")
    parser.add_argument("--moment", choices=MOMENTS, help="only then")
    parser.add_argument("--json", action="store_true", help="one JSON array as the last line")
    return parser.parse_args()


def _table(outcomes: Sequence[Outcome]) -> Table:
    missed = [f"{one.fault}, {one.moment}: {why}" for one in outcomes for why in one.missed]
    table = Table(
        *("misconfiguration", "made", "ended with", "known after s", "episodes spent"),
        *("learns again after s", "told"),
        title="misconfigured",
        caption="; ".join(missed) or "all bars met",
    )
    for one in outcomes:
        table.add_row(
            one.fault,
            one.moment,
            "goes on" if one.status is None else f"status {one.status}",
            _seconds(one.known_after_s),
            str(one.spent),
            _seconds(one.learns_after_s),
            one.told if len(one.told) <= SHOWN else f"{one.told[:SHOWN]}…",
        )
    return table


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    main()
