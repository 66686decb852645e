"""Define `pawl up` and `pawl demo`, which run all of Pawl on this machine."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from pawl.commands.common import fail
from pawl.settings import StackSettings, read_settings, refuse_unread


def up() -> None:
    """Run PostgreSQL, vLLM, proxy, trainer and steward on this machine until Ctrl-C.

    Pawl starts only what you have not configured yourself: no PostgreSQL where DATABASE_URL is
    set, no vLLM where PAWL_UPSTREAM_URL is set. A judge is started where PAWL_JUDGE_COMMAND is
    set. Each process has a log file in PAWL_LOG_DIR.

    Ctrl-C or SIGTERM stops all of it, with status 0. Status 2: a port is taken, memory or disk
    do not suffice, or the recipe cannot be used (nothing was started then); or a process ends
    again and again, and everything is stopped.
    """
    from pawl.stack.preflight import NotReady
    from pawl.stack.process import ProcessFailed
    from pawl.stack.up import run_stack
    from trainer.errors import RecipeError

    try:
        asyncio.run(run_stack(read_settings(StackSettings)))
    except (NotReady, ProcessFailed, RecipeError) as error:
        fail(str(error))


def demo(
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub name of the base model; default: the packaged SmolLM2.",
        ),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(help="Recipe to train by: name of a packaged one, or path of a TOML file."),
    ] = "demo",
    minutes: Annotated[
        float, typer.Option(min=1, help="Time limit: no new wave is begun that would pass it.")
    ] = 12.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of the questions and of the adapter.")
    ] = 0,
    var: Annotated[Path, typer.Option(help="Folder for results, data and logs.")] = Path(
        "var/demo"
    ),
) -> None:
    """Show the whole loop on this machine: an unchanged agent gets better while it works.

    Asks held-out questions, lets the example agent work while the trainer learns from it, asks
    the same questions again, and writes `reward.png`, `report.html` and `summary.json`. Needs a
    checkout of the repository, and a machine on which nothing else of Pawl runs.

    Status 2: the machine is not fit for it, or the demo could not go on. Status 130: Ctrl-C;
    everything that the demo started is stopped in each case.
    """
    from pawl.demo.errors import DemoFailed
    from pawl.demo.run import run_demo
    from pawl.stack.preflight import NotReady
    from pawl.stack.torch_build import check_torch
    from trainer.errors import RecipeError

    refuse_unread()
    try:
        check_torch()
        asyncio.run(run_demo(model=model, recipe=recipe, minutes=minutes, seed=seed, var=var))
    except (NotReady, DemoFailed, RecipeError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("pawl: interrupted; everything that the demo started is stopped.", file=sys.stderr)
        raise SystemExit(130) from None
