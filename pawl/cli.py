"""The command line: parse options, wire the parts of a command, run it, set the exit status.

Each command imports only what it needs, so that none starts slower for the sake of another.
"""

import asyncio
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn
from uuid import UUID

import typer

from pawl.logs import configure_logging
from pawl.settings import StackSettings, UnreadSettings, read_settings, refuse_unread
from store.errors import StoreError

if TYPE_CHECKING:
    from pawl.crediting.explain import Explained

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=(
        "Train the model behind your agents while they work.\n\n"
        "Start everything on this machine with `pawl up`, and set OPENAI_BASE_URL to the address "
        "that it prints. Settings are PAWL_* variables and DATABASE_URL, from the environment or "
        "`.env`; an unknown PAWL_* variable is an error.\n\n"
        "Exit status of every command: 0 if it did its work; 2 if it could not, for the reason "
        "given on standard error. The commands' own help names further ones."
    ),
)


def main() -> None:
    """Run the command line; report an expected failure in one line, without a traceback."""
    from proxy.errors import ProxyError

    configure_logging()
    try:
        app()
    except (UnreadSettings, StoreError, ProxyError) as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(f"pawl: {message}", file=sys.stderr)
    raise SystemExit(2)


# Options that select episodes.
Since = Annotated[
    datetime | None,
    typer.Option(help="Only episodes with a call at or after this time."),
]
OfAgent = Annotated[str | None, typer.Option(help="Only episodes with calls of this agent.")]
OfPolicy = Annotated[str | None, typer.Option(help="Only episodes with calls of this policy.")]


@app.command()
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
    try:
        asyncio.run(serve(settings))
    except OSError as error:
        _fail(
            f"the proxy cannot start: {error.strerror or error}. If a port is taken, stop the "
            "program that listens on it, or set PAWL_LISTEN and PAWL_ADMIN_LISTEN"
        )


@app.command()
def trainer(
    once: Annotated[
        bool, typer.Option("--once", help="Wait until one update is done, and end.")
    ] = False,
) -> None:
    """Train a policy on scored episodes, and publish each new version to the model server.

    Each update claims finished episodes, assigns credit to their calls, trains the adapter,
    and loads it into the model server. Needs the database that the proxy records to, and a
    model server that loads adapters at run time.

    SIGTERM or Ctrl-C ends it with status 0; an update in progress is abandoned and its
    episodes are free again. Status 2: recipe, model or policy cannot be used.
    """
    from trainer.errors import TrainerError
    from trainer.recipes.recipe import load_recipe
    from trainer.settings import TrainerSettings

    settings = read_settings(TrainerSettings)
    try:
        # Importing torch takes seconds: report a mistyped key of the recipe before that.
        load_recipe(settings.recipe)
        from trainer.run import train

        asyncio.run(train(settings, once=once))
    except TrainerError as error:
        _fail(str(error))


@app.command()
def up() -> None:
    """Run PostgreSQL, vLLM, proxy and trainer on this machine until Ctrl-C.

    Pawl starts only what you have not configured yourself: no PostgreSQL where DATABASE_URL is
    set, no vLLM where PAWL_UPSTREAM_URL is set. A judge is started where PAWL_JUDGE_COMMAND is
    set. Each process has a log file in PAWL_LOG_DIR.

    Ctrl-C or SIGTERM stops all of it, with status 0. Status 2: a port is taken, or memory or
    disk do not suffice; nothing was started then.
    """
    from pawl.stack.preflight import NotReady
    from pawl.stack.up import run_stack

    try:
        asyncio.run(run_stack(read_settings(StackSettings)))
    except NotReady as error:
        _fail(str(error))


@app.command()
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
    from trainer.errors import RecipeError

    refuse_unread()
    try:
        asyncio.run(run_demo(model=model, recipe=recipe, minutes=minutes, seed=seed, var=var))
    except (NotReady, DemoFailed, RecipeError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("pawl: interrupted; everything that the demo started is stopped.", file=sys.stderr)
        raise SystemExit(130) from None


@app.command()
def export(
    since: Since = None,
    agent: OfAgent = None,
    policy: OfPolicy = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: standard output.")
    ] = None,
) -> None:
    """Write recorded episodes as JSON lines, one episode each, oldest first.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR); nothing is changed
    in it. Status 2: an episode cannot be read back; each such episode is named with the reason,
    and all others are written.
    """
    from pawl.export import Selection

    selection = Selection(since=_with_zone(since), agent=agent, policy=policy)
    asyncio.run(_export(read_settings(StackSettings), selection, out))


def _with_zone(moment: datetime | None) -> datetime | None:
    """Return the time with a zone; a time without one is read in the machine's zone."""
    return moment.astimezone() if moment is not None and moment.tzinfo is None else moment


async def _export(settings: StackSettings, selection: object, out: Path | None) -> None:
    from pawl.export import Selection, export
    from pawl.stack.database import open_engine

    assert isinstance(selection, Selection)
    async with open_engine(settings) as engine:
        if out is None:
            await export(engine, selection, sys.stdout.buffer)
            return
        with out.open("wb") as file:
            count = await export(engine, selection, file)
    print(f"{count} episodes written to {out}", file=sys.stderr)


@app.command()
def judge(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="After `--`: program to run once for each episode; default: PAWL_JUDGE_COMMAND."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to ask instead of a program; needs --rubric.")
    ] = None,
    rubric: Annotated[
        Path | None, typer.Option(help="Text file that tells the model what good work is.")
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(help="Base URL of the model's server, with /v1; default: PAWL_UPSTREAM_URL."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="Temperature at which the model is sampled.")
    ] = 0.0,
    max_chars: Annotated[
        int,
        typer.Option(
            min=200, help="Characters of a transcript that the model is shown; the middle is cut."
        ),
    ] = 60_000,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name under which verdicts are stored; default: the command, or model and rubric."
        ),
    ] = None,
    quiet: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds without a call after which an episode is finished; "
            "default: PAWL_JUDGE_QUIET_S, or 600.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Episodes judged at the same time; default: PAWL_JUDGE_CONCURRENCY, or 4."
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Time limit of one judgement, in seconds; default: PAWL_JUDGE_TIMEOUT_S, or 60.",
        ),
    ] = None,
    attempts: Annotated[
        int, typer.Option(min=1, help="Failures after which an episode is not tried again.")
    ] = 5,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="End when no episode waits to be judged, as cron jobs need it."
        ),
    ] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="Judge again all episodes that could not be judged before."),
    ] = False,
    since: Since = None,
    agent: OfAgent = None,
    policy: OfPolicy = None,
    feedback_url: Annotated[
        str | None,
        typer.Option(help="URL that verdicts are posted to; default: /feedback at PAWL_LISTEN."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --once: print the counts as JSON.")
    ] = False,
) -> None:
    """Judge finished episodes that nobody has scored, and post the verdicts as feedback.

    The judge is a program (after `--`) or a model (--model with --rubric). Needs the database,
    and a proxy that takes the feedback. Runs until SIGTERM, or until nothing is left with --once.

    Status 1: at least one judgement failed. Status 2: the judge cannot run like this, or with
    --once: the model's server or the proxy does not answer. Status 130: Ctrl-C.
    """
    from pawl.export import Selection
    from pawl.judging.command import JudgeOptions, judge_episodes
    from pawl.judging.errors import JudgeError

    options = JudgeOptions(
        command=tuple(command or ()),
        model=model,
        rubric=rubric,
        base_url=base_url,
        temperature=temperature,
        max_chars=max_chars,
        name=name,
        quiet_s=quiet,
        concurrency=concurrency,
        timeout_s=timeout,
        attempts=attempts,
        once=once,
        again=again,
        selection=Selection(since=_with_zone(since), agent=agent, policy=policy),
        feedback_url=feedback_url,
    )
    try:
        tally = asyncio.run(judge_episodes(options))
    except JudgeError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if as_json:
        print(json.dumps(tally))
    else:
        counts = ", ".join(
            f"{count} {outcome.replace('_', ' ')}" for outcome, count in tally.items()
        )
        print(f"episodes: {counts}", file=sys.stderr)
    if tally["failed"]:
        raise SystemExit(1)


@app.command()
def credit(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE.jsonl]",
            help="File of episodes as `pawl export` writes them; - reads standard input.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipe to assign credit by: path of a TOML file, or name of a packaged one; "
            "default: `default`."
        ),
    ] = None,
    update: Annotated[
        str | None,
        typer.Option(
            help="Update to explain instead of a file: the number of the version that it made, "
            "or its id."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="With --update: policy of the version, if several have that number."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines on a terminal too, not a table.")
    ] = False,
) -> None:
    """Show each call's return, advantage and loss weight, and why a call is not trained.

    With a file, only the file and a recipe are needed. With --update, the database is; the
    update is computed again from what was known when it claimed its episodes.

    Status 2: the file, the recipe or the update cannot be used; nothing is printed then.
    """
    from pawl.crediting.explain import explain_file
    from pawl.crediting.show import write
    from trainer.errors import TrainerError
    from trainer.recipes.recipe import load_recipe

    if (file is None) == (update is None):
        _fail("name a file of episodes, - for standard input, or --update: exactly one of them")
    if update is not None and recipe is not None:
        _fail("an update is explained by the recipe that it ran with: leave out --recipe")
    try:
        if update is not None:
            settings = read_settings(StackSettings)
            explained = asyncio.run(_explain_update(settings, _version_or_id(update), policy))
        else:
            refuse_unread()
            explained = explain_file(str(file), load_recipe(recipe or "default"))
    except TrainerError as error:
        _fail(str(error))
    write(explained, as_json=as_json)


def _version_or_id(text: str) -> int | UUID:
    try:
        return int(text) if text.isdecimal() else UUID(text)
    except ValueError:
        _fail(f"--update is a version's number or an update's id, not {text!r}")


async def _explain_update(
    settings: StackSettings, which: int | UUID, policy: str | None
) -> "Explained":
    from pawl.crediting.past import explain_update
    from pawl.stack.database import open_engine

    async with open_engine(settings) as engine:
        return await explain_update(engine, which, policy)


@app.command()
def spool(
    replay: Annotated[
        bool, typer.Option("--replay", help="Try to store the dead letters again first.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show the records that wait on disk, and the dead letters that could not be stored.

    Reads PAWL_SPOOL_DIR; --replay also needs the database. Status 0 also if --replay could not
    store some letters: they stay on disk, and each is listed with the reason.
    """
    from pawl import spool as letters
    from pawl.stack.database import open_engine
    from proxy.settings import ProxySettings

    serving = read_settings(ProxySettings)
    folder = serving.spool_dir
    settings = read_settings(StackSettings)

    async def try_again() -> tuple[int, list[str]]:
        async with open_engine(settings) as engine:
            return await letters.replay(
                folder, engine, serving.tool_results, serving.max_reply_mb * 2**20
            )

    if replay:
        stored, refused = asyncio.run(try_again())
        print(f"{stored} dead letters stored, {len(refused)} refused again", file=sys.stderr)
        for why in refused:
            print(f"  {why}", file=sys.stderr)
    view = letters.look(folder)
    if as_json:
        print(json.dumps(letters.as_json(view)))
    else:
        print("\n".join(letters.as_lines(view)))


@app.command()
def migrate(
    revision: Annotated[
        str, typer.Argument(help="Revision of the schema to go to; `head` is the newest.")
    ] = "head",
    down: Annotated[
        bool, typer.Option("--down", help="Go down to an older revision; may lose data.")
    ] = False,
) -> None:
    """Upgrade the database's schema to a revision, or downgrade it with --down.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). Proxy, trainer and
    `pawl export` upgrade the schema themselves when they start.
    """
    from store.schema.migrate import downgrade, upgrade

    settings = read_settings(StackSettings)

    async def run() -> None:
        from pawl.stack.database import open_database

        async with open_database(settings) as url:
            await (downgrade(url, revision) if down else upgrade(url, revision))

    asyncio.run(run())


if __name__ == "__main__":
    main()
