"""Train the same ledger twice: by trainers that are left alone, and by ones that are killed.

Where one trainer of all policies is killed, it is compared with one trainer for each, left alone.
"""

import asyncio
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos.trainer.cast import POLICIES_TOML, trained
from benchmarks.chaos.trainer.database import Database
from benchmarks.chaos.trainer.forks import Zygote, zygote
from benchmarks.chaos.trainer.found import found_in
from benchmarks.chaos.trainer.lives import Run, model_server
from benchmarks.chaos.trainer.place import Place
from benchmarks.chaos.trainer.recipe import recipe_toml
from benchmarks.chaos.trainer.report import Trained, ledger_report, policy_report
from store.embedded.server import EmbeddedPostgres

STAGE_S: Final = 300.0
# So many kills to an update: most lives do not live to see one whole.
KILLS_AN_UPDATE: Final = 2


class NotStaged(Exception):
    """Report that the ledger could not be made; the message ends with what was said of it."""


# What is done to a trainer's run; with the seconds that an undisturbed update takes.
Disturb = Callable[[Run, float], None]


@dataclass(frozen=True, slots=True)
class Task:
    """Define what is trained in both runs."""

    folder: Path
    updates: int
    seed: int
    recipe: str
    policies: int = 1
    # Whether one trainer trains all of them while it is killed.
    shared: bool = False


def trainer_kills(
    folder: Path,
    kills: int,
    seed: int,
    *,
    learner: str = "grpo",
    baseline: str = "group",
    policies: int = 1,
    shared: bool = False,
) -> dict[str, dict[str, Any]]:
    """Kill the policies' trainers so many times in all; what became of each, and of the ledger."""
    updates = max(4, kills // policies // KILLS_AN_UPDATE)
    each = kills if shared else kills // policies
    dice = {name: random.Random(seed + n) for n, name in enumerate(trained(policies))}
    recipe = recipe_toml(updates, learner, baseline)
    task = Task(folder, updates, seed, recipe, policies, shared)
    return compared(task, lambda run, update_s: run.kill(each, dice[run.place.names[0]], update_s))


def compared(task: Task, disturb: Disturb) -> dict[str, dict[str, Any]]:
    """Train a ledger twice, the second time while `disturb` is at each policy's run.

    What became of each policy is under its name; under `ledger`, what it was trained on.
    """
    postgres = EmbeddedPostgres(task.folder)
    postgres.ensure_running()
    database = Database(postgres)
    names = trained(task.policies)
    try:
        with zygote(task.folder / "zygote.log") as forks:
            calm_places, killed_places = (
                _places(task, "calm", database, [(name,) for name in names]),
                _places(
                    task,
                    "killed",
                    database,
                    [tuple(names)] if task.shared else [(name,) for name in names],
                ),
            )
            _stage(forks, task, [calm_places[0].database_url, killed_places[0].database_url])
            calm = _run(forks, database, calm_places, lambda _: None)
            update_s = {name: one.found.update_s for name, one in calm.items()}
            killed = _run(
                forks,
                database,
                killed_places,
                lambda run: disturb(run, max(update_s[name] for name in run.place.names)),
            )
        last = killed_places[0]
        ledger = asyncio.run(ledger_report(last.database_url, last.adapters, names))
    finally:
        postgres.stop()
    reports = {name: policy_report(task.updates, calm[name], killed[name]) for name in names}
    return reports | {"ledger": ledger}


def _places(
    task: Task, name: str, database: Database, trainers: list[tuple[str, ...]]
) -> list[Place]:
    """Make the places of a run, one for each of its trainers, with a database that is empty yet.

    `trainers` are the policies of each.
    """
    folder, url = task.folder / name, database.create(name)
    folder.mkdir()
    (folder / "recipe.toml").write_text(task.recipe)
    (folder / "policies.toml").write_text(POLICIES_TOML)
    return [
        Place(
            folder=folder,
            database_url=url,
            names=names,
            model=task.folder / "model",
            recipe=folder / "recipe.toml",
            policies=folder / "policies.toml" if task.policies > 1 else None,
            updates=task.updates,
        )
        for names in trainers
    ]


def _stage(forks: Zygote, task: Task, urls: list[str]) -> None:
    log = task.folder / "stage.log"
    pid = forks.start(
        "stage",
        log,
        {},
        model=str(task.folder / "model"),
        database_urls=urls,
        updates=task.updates,
        seed=task.seed,
        policies=task.policies,
    )
    if forks.wait(pid, STAGE_S) != 0:
        raise NotStaged(log.read_text()[-2000:])


def _run(
    forks: Zygote, database: Database, places: list[Place], disturb: Callable[[Run], None]
) -> dict[str, Trained]:
    """Train all policies at the same time, each to its end; what came of it, by policy."""
    with (
        model_server(forks, places[0].folder, places[0].model) as port,
        ThreadPoolExecutor(len(places)) as threads,
    ):
        runs = [Run(forks, database, place, port) for place in places]
        list(threads.map(lambda run: run.to_its_end(disturb), runs))
    return {name: _trained(run, name) for run in runs for name in run.place.names}


def _trained(run: Run, policy: str) -> Trained:
    at = run.place
    found = asyncio.run(found_in(at.database_url, at.adapters, policy))
    # A line may be cut off by a kill.
    own = re.compile(rb'"policy": ?"%b"' % policy.encode())
    late = [line for line in at.said().splitlines() if b'"update_finished_late"' in line]
    return Trained(found, run.lives, sum(own.search(line) is not None for line in late))
