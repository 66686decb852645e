"""The commands that run one process of Pawl each (`pawl proxy`, `trainer`, …), and `migrate`."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from pawl.commands.common import fail, require_torch
from pawl.processes import die_with_parent, end_if_hung, gpu_environment, large_imports
from pawl.settings import StackSettings, read_settings


def proxy(
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Number of processes that take calls; default: PAWL_WORKERS, or 1."
        ),
    ] = None,
) -> None:
    """Serve agents: forward their calls to the model server, record them, and take feedback.

    Needs a model server (PAWL_UPSTREAM_URL, or several in PAWL_UPSTREAMS). Records go to
    PostgreSQL (DATABASE_URL); without that setting, to an embedded server in PAWL_DATA_DIR.

    SIGTERM or Ctrl-C ends it with status 0, calls in progress first; SIGHUP replaces the
    workers without a failed request. Status 2: a port is taken, a setting cannot be used, or a
    process ends again and again as soon as it is started.
    """
    from pawl.serving.supervisor import serve
    from proxy.settings import ProxySettings

    settings = read_settings(ProxySettings)
    if workers is not None:
        settings = settings.model_copy(update={"workers": workers})
    _run(serve(settings), "the proxy")


def trainer(
    once: Annotated[
        bool, typer.Option("--once", help="Wait until one update is done, of any policy, and end.")
    ] = False,
) -> None:
    """Train policies on scored episodes, and publish each new version to the model server.

    Each update claims finished episodes, assigns credit to their calls, trains the adapter,
    and loads it into the model server. Several policies (PAWL_POLICIES) share the base model in
    memory, and take turns; PAWL_POLICY picks some of them. Where PAWL_TRAIN_GPUS names several
    GPUs, this process starts one for each, as `accelerate launch` does.

    Needs the database that the proxy records to, and a model server that loads adapters at run
    time.

    SIGTERM or Ctrl-C ends it with status 0; an update in progress is abandoned and its
    episodes are free again. Status 2: a recipe, the model, a policy or a GPU cannot be used.
    """
    from pawl.stack.preflight import NotReady
    from trainer.errors import ShortOfMemory, TrainerError
    from trainer.policies import trained_recipes
    from trainer.settings import TrainerSettings

    settings = read_settings(TrainerSettings)
    try:
        # Importing torch takes seconds: report a mistyped key of the recipe before that.
        trained_recipes(settings)
        _use_gpus(settings.train_gpus, ["--once"] if once else [])
        with large_imports():
            require_torch()
            from trainer.run import train

        asyncio.run(train(settings, once=once))
    except (NotReady, TrainerError) as error:
        if isinstance(error, ShortOfMemory) and "RANK" in os.environ:
            # Not status 2: the other ranks wait in the middle of loading, and all must restart.
            raise
        fail(str(error))


def _use_gpus(gpus: Sequence[int], options: Sequence[str]) -> None:
    """Limit CUDA to these GPUs; for several, train in one process for each GPU, and exit.

    In a process that was launched for one GPU, only let it end with its launcher.

    Raises:
        NotReady: a GPU does not exist.
    """
    from pawl.stack.preflight import check_gpus

    if "RANK" in os.environ:
        # SIGKILL, as ranks other than 0 ignore SIGTERM.
        die_with_parent(signal.SIGKILL)
        return
    check_gpus("PAWL_TRAIN_GPUS", gpus)
    os.environ.update(gpu_environment(gpus))
    if len(gpus) < 2:
        return
    # The same as `-P`, for the processes to launch.
    os.environ["PYTHONSAFEPATH"] = "1"
    with large_imports():
        require_torch()
        from trainer.learners.distributed import launch

    raise SystemExit(launch(len(gpus), "pawl.cli", ["trainer", *options]))


def controller() -> None:
    """Keep the adapters of each model server loaded, whether a trainer runs or not.

    Looks at every replica (PAWL_UPSTREAM_URL, PAWL_REPLICA_URLS) on its own: a server that was
    restarted gets the versions back that the database lists as servable, and one that serves other
    files under a version's name gets the right ones.

    Decides about versions as the recipe's `[publish]` says, by the rewards of their episodes: it
    promotes them or rolls them back, with the reason in `pawl policies show --events`. Several
    controllers may run at once.

    SIGTERM or Ctrl-C ends it with status 0. Status 2: its port is taken, or a setting cannot be
    used.
    """
    from controller.run import controller as run
    from pawl.settings import ControllerSettings

    _run(run(read_settings(ControllerSettings)), "the controller")


def _run(process: Coroutine[Any, Any, None], name: str) -> None:
    """Run a process to its end; report expected errors in one line."""
    from trainer.errors import TrainerError

    try:
        asyncio.run(end_if_hung(process))
    except TrainerError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{name} cannot go on: {error}: give this user access, or set another path")


def adapters() -> None:
    """Fetch adapters for a model server that does not share the trainer's folder.

    Runs beside one model server (PAWL_UPSTREAM_URL). Trainer and controller use it in the server's
    place: their PAWL_UPSTREAM_URL or PAWL_REPLICA_URLS has the address PAWL_ADAPTERS_LISTEN. The
    proxy keeps the server's own address. A version that is to be loaded is fetched from
    PAWL_ADAPTER_SOURCE into PAWL_ADAPTER_DIR, which the model server reads, and checked; then the
    server loads it. All other requests are passed on to the server.

    SIGTERM or Ctrl-C ends it with status 0; the next start resumes unfinished downloads.
    Status 2: its port is taken, or a setting cannot be used.
    """
    from pawl.adapters import run
    from pawl.settings import AdaptersSettings

    settings = read_settings(AdaptersSettings)
    if settings.adapter_source is None:
        fail("PAWL_ADAPTER_SOURCE is not set: `pawl adapters` fetches from there")
    _run(run(settings), "`pawl adapters`")


def console() -> None:
    """Serve pages on which people see what their agents do, and whether the policies learn.

    Reads the database that the proxy records to (DATABASE_URL, or the embedded one in
    PAWL_DATA_DIR) with a few connections of its own, and needs no other process. It answers on
    PAWL_CONSOLE_LISTEN, and asks for an API key of scope read once a key was made; until then it
    answers this machine alone (PAWL_ACCESS).

    SIGTERM or Ctrl-C ends it with status 0. Status 2: its port is taken, or a setting cannot be
    used.
    """
    from console.app import run
    from pawl.settings import ConsoleSettings

    _run(run(read_settings(ConsoleSettings)), "the console")


class CheckedProcess(StrEnum):
    """A process whose settings `pawl migrate` can check."""

    PROXY = "proxy"
    TRAINER = "trainer"
    CONTROLLER = "controller"
    CONSOLE = "console"


def _check_settings(process: CheckedProcess) -> None:
    """Fail if a process cannot use its settings, or a file that they name."""
    from pawl.serving.supervisor import check_files
    from pawl.settings import ConsoleSettings, ControllerSettings
    from proxy.settings import ProxySettings
    from trainer.errors import TrainerError
    from trainer.policies import trained_recipes
    from trainer.settings import TrainerSettings

    match process:
        case CheckedProcess.PROXY:
            check_files(read_settings(ProxySettings))
        case CheckedProcess.TRAINER:
            try:
                trained_recipes(read_settings(TrainerSettings))
            except TrainerError as error:
                fail(str(error))
        case CheckedProcess.CONTROLLER:
            read_settings(ControllerSettings)
        case CheckedProcess.CONSOLE:
            read_settings(ConsoleSettings)


def migrate(
    revision: Annotated[
        str, typer.Argument(help="Revision of the schema to go to; `head` is the newest.")
    ] = "head",
    down: Annotated[
        bool, typer.Option("--down", help="Go down to an older revision; may lose data.")
    ] = False,
    check: Annotated[
        list[CheckedProcess] | None,
        typer.Option(
            help="Do nothing unless this process could use the settings here, and the files that "
            "they name. May be given several times.",
        ),
    ] = None,
) -> None:
    """Upgrade the database's schema to a revision, or downgrade it with --down.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). Proxy, trainer and
    `pawl export` upgrade the schema themselves when they start.

    Status 2: a setting or a file cannot be used, or the schema cannot be migrated.
    """
    from pawl.database import open_database
    from store.schema.migrate import downgrade, upgrade

    settings = read_settings(StackSettings)
    for name in check or ():
        _check_settings(name)

    async def run() -> None:
        async with open_database(settings, create=True) as url:
            await (downgrade(url, revision) if down else upgrade(url, revision))

    asyncio.run(run())
