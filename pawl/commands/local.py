"""`pawl up`, `pawl demo` and `pawl example`: run all of Pawl on this machine."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from pawl.commands.common import fail
from pawl.processes import stop_event
from pawl.scenarios.run import DEMO, RunOptions, run_scenario
from pawl.scenarios.scenario import ScenarioFailed
from pawl.settings import ConsoleSettings, StackSettings, read_settings, refuse_unknown_settings
from pawl.stack.model import unpacked_unless_stopped
from pawl.stack.preflight import NotReady, check_folder, check_torch
from pawl.stack.process import ProcessFailed
from pawl.stack.stack import StackPlan, configured_plan, running_stack
from proxy.settings import ProxySettings
from store.policy_table import open_policies
from trainer.errors import RecipeError
from trainer.policies import chosen_policies, load_recipes
from trainer.settings import TrainerSettings

DEFAULT_POLICY: Final = "smollm2"

Minutes = Annotated[
    float,
    typer.Option(min=1, help="Time limit once all has started: no wave begins that would pass it."),
]
Updates = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of updates after which to stop, whatever was learned, if time allows; "
        "default: the waves end when two in a row were good.",
    ),
]
HeldOutEvery = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of waves after which the held-out tasks are asked again; default: the "
        "example's own.",
    ),
]


def up() -> None:
    """Run PostgreSQL, vLLM, proxy, trainer, controller and console on this machine until Ctrl-C.

    Pawl starts only what you have not configured yourself: no PostgreSQL where DATABASE_URL is
    set, no vLLM where PAWL_UPSTREAM_URL is set. Each process has a log file in PAWL_LOG_DIR.

    Ctrl-C or SIGTERM stops all of it, with status 0. Status 2: a port is taken, memory or disk
    do not suffice, or the recipe cannot be used (nothing was started then); or a process ends
    again and again, and everything is stopped.
    """
    try:
        asyncio.run(run_stack(read_settings(StackSettings)))
    except (NotReady, ProcessFailed, RecipeError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        # Ctrl-C while the model was unpacked: nothing was started.
        pass


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
    ] = "default",
    minutes: Minutes = 12.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of the questions and of the adapter.")
    ] = 0,
    var: Annotated[Path, typer.Option(help="Folder for results, data and logs.")] = Path(
        "var/demo"
    ),
) -> None:
    """Show the whole loop on this machine: an unchanged agent gets better while it works.

    Asks held-out questions, lets the example agent work while the trainer learns from it, asks
    the same questions again, and writes `reward.png` and `summary.json`. Needs a
    checkout of the repository, and a machine on which nothing else of Pawl runs.

    Status 2: the machine is not fit for it, or the demo could not go on. Status 130: Ctrl-C or
    SIGTERM; everything that the demo started is stopped in each case.
    """
    options = RunOptions(
        name=DEMO,
        model=model,
        recipe=recipe,
        minutes=minutes,
        seed=seed,
        var=var,
        models=var.parent / "models",
    )
    _run_scenario(options, "the demo")


def example(
    name: Annotated[
        str | None, typer.Argument(help="A folder of `examples` that has an example.toml.")
    ] = None,
    minutes: Minutes = 30.0,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub name of the base model; default: the packaged SmolLM2, if it can do"
            " the tasks."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of the tasks and of the adapter.")
    ] = 0,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipe to train by: name of a packaged one, or path of a TOML file; default: "
            "the example's own."
        ),
    ] = None,
    updates: Updates = None,
    held_out_every: HeldOutEvery = None,
    var: Annotated[
        Path | None,
        typer.Option(help="Folder for results, data and logs; default: var/examples/NAME."),
    ] = None,
) -> None:
    """Let an example's agent, built with an unmodified framework, get better while it works.

    Does with the example NAME what `pawl demo` does with its agent, and writes `reward.png`
    and `summary.json` to its folder. Needs a checkout of the repository with the frameworks
    (`make example NAME=math` installs them), and a machine on which nothing else of Pawl runs.

    Status 2: there is no such example, the machine is not fit for it, or it could not go on.
    Status 130: Ctrl-C or SIGTERM; everything that was started is stopped in each case.
    """
    if not name:
        fail("name an example, as in `make example NAME=math`")
    options = RunOptions(
        name=name,
        model=model,
        minutes=minutes,
        seed=seed,
        recipe=recipe,
        updates=updates,
        held_out_every=held_out_every,
        var=var or Path("var/examples") / name,
        models=Path("var/models"),
    )
    _run_scenario(options, f"the example {name}")


def _run_scenario(options: RunOptions, name: str) -> None:
    refuse_unknown_settings()
    try:
        check_torch()
        asyncio.run(run_scenario(options))
    except (NotReady, ScenarioFailed, RecipeError) as error:
        fail(str(error))
    except (KeyboardInterrupt, asyncio.CancelledError):  # Ctrl-C, SIGTERM
        print(f"pawl: interrupted; everything that {name} started is stopped.", file=sys.stderr)
        raise SystemExit(130) from None


async def run_stack(settings: StackSettings) -> None:
    """Start the stack, print how to use it, and keep it until SIGINT or SIGTERM.

    The signals also stop a stack that is still starting.

    Raises:
        NotReady: the machine cannot run the stack; nothing was started.
        ProcessFailed: a process cannot be kept running.
    """
    stopping = asyncio.create_task(stop_event().wait())
    running = asyncio.create_task(_run_stack(settings))
    await asyncio.wait([stopping, running], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def _run_stack(settings: StackSettings) -> None:
    console = Console(stderr=True)
    plan = await _plan(settings)
    with console.status("starting") as status:
        async with running_stack(
            plan, lambda waiting: status.update(f"waiting for {waiting}")
        ) as stack:
            status.stop()
            console.print(
                f"[bold]Pawl is up.[/] Run your agent with  OPENAI_BASE_URL={stack.base_url}"
            )
            console.print(f"Rewards go to   POST {stack.feedback_url}")
            prefix = read_settings(ConsoleSettings).console_prefix
            console.print(f"Console: http://{plan.console_listen}{prefix}/")
            admin = f"http://{plan.admin_listen}"
            console.print(f"Health: {admin}/readyz   Metrics: {admin}/metrics")
            console.print("Ctrl-C stops everything.")
            await stack.serve(lambda line: console.print(line, style="red", markup=False))


async def _plan(settings: StackSettings) -> StackPlan:
    check_folder("PAWL_DATA_DIR", settings.data_dir)
    proxy = read_settings(ProxySettings)
    trainer = read_settings(TrainerSettings)
    outside = "upstream_url" in proxy.model_fields_set
    model = settings.model
    if model is None and not outside:
        model = str(await unpacked_unless_stopped(settings.data_dir / "models"))
    # One trainer trains all policies, which share one base model.
    chosen = chosen_policies(trainer, open_policies(trainer.policies))
    policy = trainer.policy
    if trainer.policies is None and not outside:
        policy = policy or settings.model or DEFAULT_POLICY
    return configured_plan(
        model or "",
        chosen[0].base or policy or "",
        max(recipe.lora.rank for recipe in load_recipes(chosen)),
        database_url=settings.database_url.get_secret_value() if settings.database_url else None,
        upstream_url=str(proxy.upstream_url) if outside else None,
        data_dir=settings.data_dir,
        log_dir=settings.log_dir,
        settings={"PAWL_POLICY": policy or "", "PAWL_MODEL": model or ""},
    )
