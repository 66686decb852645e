"""Run trainers over a ledger: each is brought to its end, and what came of each policy."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.chaos.beside.model_server import Computing, ModelServer, Vllm, running
from benchmarks.chaos.beside.standing import Stand, beside
from benchmarks.chaos.trainer.cast import trained
from benchmarks.chaos.trainer.database import Database
from benchmarks.chaos.trainer.forks import Zygote
from benchmarks.chaos.trainer.found import found_in
from benchmarks.chaos.trainer.lives import Run
from benchmarks.chaos.trainer.place import Place
from benchmarks.chaos.trainer.report import Trained
from benchmarks.chaos.trainer.shown import showing

Beside = Literal["computing", "vllm"]


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
    # So often the trainers are killed, and so often model server and steward.
    kills: int = 0
    kills_beside: int = 0
    # The model server that is killed beside them; None: nothing stands there but one that is not.
    beside: Beside | None = None


def undisturbed(forks: Zygote, database: Database, places: list[Place]) -> dict[str, Trained]:
    """Train all policies to their ends; what came of it, by policy."""
    with running(Computing(forks, places[0].folder, places[0].model)) as server:
        runs = [Run(forks, database, place, server.port, _at_once) for place in places]
        return _to_their_ends(runs, "undisturbed", lambda _: None)


def disturbed(
    forks: Zygote,
    database: Database,
    places: list[Place],
    task: Task,
    disturb: Callable[[Run], None],
) -> tuple[dict[str, Trained], dict[str, dict[str, Any]]]:
    """Do so while `disturb` is at each trainer; what came of it, and of what stands beside."""
    first = places[0]
    is_vllm = task.beside == "vllm"
    server: ModelServer = (
        Vllm(first.folder, first.model) if is_vllm else Computing(forks, first.folder, first.model)
    )
    with running(server):
        with _beside(forks, database, first, server, task) as rest:
            before_a_life = _at_once if rest is None else rest.wait_if_slow
            runs = [Run(forks, database, place, server.port, before_a_life) for place in places]
            killing = nullcontext() if rest is None else rest.killing(lambda: _share(runs, task))
            with killing:
                found = _to_their_ends(runs, "killed", disturb)
        return found, {} if rest is None else {"beside": rest.report()}


@contextmanager
def _beside(
    forks: Zygote, database: Database, place: Place, server: ModelServer, task: Task
) -> Iterator[Stand | None]:
    """Run what stands beside the trainers, if anything does."""
    if task.beside is None:
        yield None
        return
    names = trained(task.policies)
    with beside(forks, database, place, names, server, task.kills_beside, task.seed) as rest:
        yield rest


def _at_once() -> None:
    """Wait for nothing before a life."""


def _share(runs: Sequence[Run], task: Task) -> float:
    """Return the share of the trainers' kills that are done."""
    return sum(run.lives.killed.total() for run in runs) / max(1, task.kills)


def _to_their_ends(
    runs: list[Run], title: str, disturb: Callable[[Run], None]
) -> dict[str, Trained]:
    with showing(runs, title), ThreadPoolExecutor(len(runs)) as threads:
        list(threads.map(lambda run: run.to_its_end(disturb), runs))
    return {name: _trained(run, name) for run in runs for name in run.place.names}


def _trained(run: Run, policy: str) -> Trained:
    at = run.place
    found = asyncio.run(found_in(at.database_url, at.adapters, policy))
    # A line may be cut off by a kill.
    own = re.compile(rb'"policy": ?"%b"' % policy.encode())
    late = [line for line in at.said().splitlines() if b'"update_finished_late"' in line]
    return Trained(found, run.lives, sum(own.search(line) is not None for line in late))
