"""The same ledger trained twice: by a trainer that is left alone, and by one that is killed."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import asyncpg

from benchmarks.chaos.trainer.forks import GONE_S, Zygote, zygote
from benchmarks.chaos.trainer.found import Found, differing, found_in
from benchmarks.chaos.trainer.lives import Lives, Place, Run, running
from benchmarks.chaos.trainer.recipe import recipe_toml
from store.embedded.server import EmbeddedPostgres

STAGE_S: Final = 300.0
# So many kills to an update: most lives do not live to see one whole.
KILLS_AN_UPDATE: Final = 2


class NotStaged(Exception):
    """The ledger could not be made; the message ends with what was said of it."""


def trainer_kills(
    folder: Path, kills: int, seed: int, *, learner: str = "grpo", baseline: str = "group"
) -> dict[str, Any]:
    """Kill a trainer so many times; what became of its episodes and versions."""
    updates = max(4, kills // KILLS_AN_UPDATE)
    dice = random.Random(seed)
    recipe = recipe_toml(updates, learner, baseline)
    return compared(
        folder, updates, seed, recipe, lambda run, update_s: run.kill(kills, dice, update_s)
    )


def compared(
    folder: Path, updates: int, seed: int, recipe: str, disturb: Callable[[Run, float], None]
) -> dict[str, Any]:
    """Train a ledger of so many updates twice, the second time while `disturb` is at it.

    `disturb` is told how long an undisturbed update takes, in seconds.
    """
    postgres = EmbeddedPostgres(folder)
    url = postgres.ensure_running()
    (folder / "recipe.toml").write_text(recipe)
    try:
        with zygote(folder / "zygote.log") as forks:
            _stage(forks, folder, url, updates, seed)
            calm, calm_lives = _run(forks, folder, postgres, "calm", updates, lambda _: None)
            killed, lives = _run(
                forks, folder, postgres, "killed", updates, lambda run: disturb(run, calm.update_s)
            )
    finally:
        postgres.stop()
    return _report(updates, calm, killed, calm_lives, lives, folder / "killed" / "trainer.log")


def _stage(forks: Zygote, folder: Path, url: str, updates: int, seed: int) -> None:
    log = folder / "stage.log"
    model = str(folder / "model")
    pid = forks.start("stage", log, {}, model=model, database_url=url, updates=updates, seed=seed)
    if forks.wait(pid, STAGE_S) != 0:
        raise NotStaged(log.read_text()[-2000:])


def _run(
    forks: Zygote,
    folder: Path,
    postgres: EmbeddedPostgres,
    name: str,
    updates: int,
    disturb: Callable[[Run], None],
) -> tuple[Found, Lives]:
    own = postgres.url.replace("/pawl?", f"/{name}?")
    asyncio.run(_copy(postgres.url.replace("/pawl?", "/postgres?"), name))
    place = Place(folder / name, own, folder / "model", folder / "recipe.toml", updates)
    with running(forks, postgres, place) as run:
        disturb(run)
        run.finish()
    return asyncio.run(found_in(own, place.adapters)), run.lives


async def _copy(admin_url: str, name: str) -> None:
    """A database with the ledger, down to its ids."""
    connection = await asyncpg.connect(admin_url, timeout=GONE_S)
    try:
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE pawl")
    finally:
        await connection.close()


def _report(
    updates: int, calm: Found, killed: Found, calm_lives: Lives, lives: Lives, log: Path
) -> dict[str, Any]:
    last = max(killed.states)
    adapter = f"{max(calm.states)}/adapter_model.safetensors"
    said = log.read_text()
    kills = sum(lives.killed.values())
    return {
        "updates": updates,
        "episodes": len(calm.outcomes),
        "kills": kills,
        "killed": dict(lives.killed.most_common()),
        "kills_without_work": lives.idle,
        "asked_to_stop": len(lives.stopped_after),
        "slowest_stop_s": round(max(lives.stopped_after, default=0.0), 2),
        "by_themselves": [*calm_lives.by_themselves, *lives.by_themselves],
        "updates_abandoned": killed.updates.get("abandoned", 0),
        "updates_finished_late": said.count('"update_finished_late"'),
        "lost": [*calm.lost, *killed.lost],
        "twice": [*calm.twice, *killed.twice],
        "spent_otherwise": differing(calm.outcomes, killed.outcomes),
        "versions": {"undisturbed": max(calm.states), "killed": last},
        "states_differ": differing(calm.states, killed.states),
        "files": len(calm.files),
        "files_differ": differing(calm.files, killed.files),
        "final_adapter": {
            "undisturbed": calm.files.get(adapter, "none")[:16],
            "killed": killed.files.get(adapter, "none")[:16],
        },
        "an_update_s": round(calm.update_s, 2),
        "undisturbed_s": round(calm_lives.seconds, 1),
        "killed_s": round(lives.seconds, 1),
        "a_life_s": round(lives.seconds / (kills + 1), 2),
    }
