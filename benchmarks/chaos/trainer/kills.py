"""Train the same ledger twice: by trainers that are left alone, and by ones that are killed.

Where one trainer of all policies is killed, it is compared with one trainer for each, left alone.
Model server and steward are killed beside the trainers, unless nothing stands beside them.
"""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos.trainer.cast import POLICIES_TOML, trained
from benchmarks.chaos.trainer.database import Database
from benchmarks.chaos.trainer.forks import Zygote, zygote
from benchmarks.chaos.trainer.lives import Run
from benchmarks.chaos.trainer.place import Place
from benchmarks.chaos.trainer.recipe import recipe_toml
from benchmarks.chaos.trainer.report import ledger_report, policy_report
from benchmarks.chaos.trainer.runs import Beside, Task, disturbed, undisturbed
from store.embedded import EmbeddedPostgres

STAGE_S: Final = 300.0
# So many kills to an update: most lives do not live to see one whole.
KILLS_AN_UPDATE: Final = 2
# The share of the kills that hit model server and steward, where they stand beside the trainers.
OF_THE_REST: Final = 0.4


class NotStaged(Exception):
    """Report that the ledger could not be made; the message ends with what was said of it."""


# What is done to a trainer's run; with the seconds that an undisturbed update takes.
Disturb = Callable[[Run, float], None]


def trainer_kills(
    folder: Path,
    kills: int,
    seed: int,
    *,
    learner: str = "grpo",
    baseline: str = "group",
    policies: int = 1,
    shared: bool = False,
    beside: Beside | None = "computing",
) -> dict[str, dict[str, Any]]:
    """Kill so many times in all; what became of each policy, of the ledger, and beside.

    Without `beside` all kills are the trainers', and nothing but a model server stands there.
    """
    kills_beside = 0 if beside is None else round(OF_THE_REST * kills)
    of_trainers = kills - kills_beside
    updates = max(4, of_trainers // policies // KILLS_AN_UPDATE)
    each = of_trainers if shared else of_trainers // policies
    dice = {name: random.Random(seed + n) for n, name in enumerate(trained(policies))}
    task = Task(
        folder,
        updates,
        seed,
        recipe_toml(learner, baseline),
        policies,
        shared,
        kills=of_trainers,
        kills_beside=kills_beside,
        beside=beside,
    )
    return compared(task, lambda run, update_s: run.kill(each, dice[run.place.names[0]], update_s))


def compared(task: Task, disturb: Disturb) -> dict[str, dict[str, Any]]:
    """Train a ledger twice, the second time while `disturb` is at each policy's run.

    What became of each policy is under its name; under `ledger`, what it was trained on; under
    `beside`, what became of the rest, where it was killed too.
    """
    postgres = EmbeddedPostgres(task.folder)
    postgres.ensure_running()
    try:
        with zygote(task.folder / "zygote.log") as forks:
            return _compared(forks, Database(postgres), task, disturb)
    finally:
        postgres.stop()


def _compared(
    forks: Zygote, database: Database, task: Task, disturb: Disturb
) -> dict[str, dict[str, Any]]:
    names = trained(task.policies)
    alone: list[tuple[str, ...]] = [(name,) for name in names]
    calm_places = _places(task, "calm", database, alone)
    killed_places = _places(task, "killed", database, [tuple(names)] if task.shared else alone)
    _stage(forks, task, [calm_places[0].database_url, killed_places[0].database_url])
    calm = undisturbed(forks, database, calm_places)
    update_s = {name: one.found.update_s for name, one in calm.items()}
    killed, of_the_rest = disturbed(
        forks,
        database,
        killed_places,
        task,
        lambda run: disturb(run, max(update_s[name] for name in run.place.names)),
    )
    last = killed_places[0]
    ledger = asyncio.run(ledger_report(last.database_url, last.adapters, names))
    reports = {name: policy_report(task.updates, calm[name], killed[name]) for name in names}
    return reports | {"ledger": ledger} | of_the_rest


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
