"""`pawl train`: the trainer's updates on a file of episodes."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from pawl.commands.common import AsJson, fail, require_torch
from pawl.processes import large_imports
from pawl.settings import read_settings
from trainer.errors import TrainerError
from trainer.exported import policies_of, read_episodes
from trainer.recipes.recipe import load_recipe
from trainer.settings import TrainerSettings
from trainer.trackers import Trackers

# The figures of an update that a terminal shows, in this order.
SHOWN_FIGURES: Final = (
    *("reward_mean", "trained_episodes", "episodes", "loss", "grad_norm"),
    *("kl_to_base", "teacher_kl"),
)


def train(
    file: Annotated[
        Path,
        typer.Argument(metavar="EPISODES.jsonl", help="File of episodes that `pawl export` wrote."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write the versions' adapters into.")],
    recipe: Annotated[
        str | None,
        typer.Option(help="Path of a TOML file, or name of a packaged one; default: PAWL_RECIPE."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or name of the base model; default: PAWL_MODEL."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Policy whose calls are trained; default: the only one in the file."),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the version to start from, in PAWL_ADAPTER_DIR; default: the base."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train on exported episodes, without a database or a model server.

    Each update is the trainer's: the recipe's groups in the file's order, its credit, its learner.
    Episodes that other versions sampled count as far as the recipe's off_policy lets them. A
    version is a folder POLICY/N of --out, as in PAWL_ADAPTER_DIR. PAWL_TRACKERS applies.

    Status 2: the file lacks what training needs, or the recipe, the model or --start cannot be
    used.
    """
    settings = read_settings(TrainerSettings)
    base = model or settings.model
    if base is None:
        fail("which base model sampled the episodes? Name its folder: --model or PAWL_MODEL")
    try:
        rules = load_recipe(recipe or settings.recipe)
        with file.open("rb") as lines:
            episodes = read_episodes(lines, str(file))
        policies = policies_of(episodes)
        chosen = policy or (policies[0] if len(policies) == 1 else None)
        if chosen not in policies:
            fail(
                f"{file} has trainable calls of {', '.join(policies) or 'no policy'}: name one of"
                " these with --policy, or export other episodes"
            )
        assert chosen is not None
        trackers = Trackers(
            settings.trackers, settings.tracking_dir, {chosen: rules.model_dump(mode="json")}
        )
        with large_imports():
            require_torch()
            from trainer.offline import train_episodes
        as_lines = as_json or not sys.stdout.isatty()
        try:
            with Progress(console=Console(stderr=True), disable=as_lines) as progress:
                task = progress.add_task("updates", total=None)

                def show(
                    number: int, folder: Path | None, metrics: Mapping[str, Any], of: int
                ) -> None:
                    progress.update(task, advance=1, total=of)
                    line = {"version": number if folder else None, "folder": folder and str(folder)}
                    if as_lines:
                        print(msgspec.json.encode(line | dict(metrics)).decode(), flush=True)
                    else:
                        progress.console.print(_update_line(chosen, line["version"], metrics))

                left = asyncio.run(
                    train_episodes(
                        episodes,
                        rules,
                        chosen,
                        base,
                        out,
                        show,
                        start=start,
                        seed=settings.seed,
                        teacher_key=settings.teacher_api_key,
                        trackers=trackers,
                    )
                )
        finally:
            trackers.close()
    except TrainerError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or file}: {error.strerror}")
    if left:
        reasons = ", ".join(f"{count} {why}" for why, count in sorted(left.items()))
        print(f"pawl: episodes in no update: {reasons}", file=sys.stderr)


def _update_line(policy: str, version: Any, metrics: Mapping[str, Any]) -> Text:
    """Return an update as a line for a terminal, the reward first."""
    name = f"{policy}@{version}" if version else "no signal"
    figures = (
        f"{key} {value:.4g}" for key in SHOWN_FIGURES if (value := metrics.get(key)) is not None
    )
    # Clients choose names, so rich must not read markup.
    return Text(f"{name}  {'  '.join(figures)}")
