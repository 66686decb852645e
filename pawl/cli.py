"""`pawl`: parse, wire, run, exit code. Every command imports what it needs, and no more."""

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
    from pawl.credit import Explained

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Agents get better while they work. Point OPENAI_BASE_URL at the proxy; the rest is here.",
)


def main() -> None:
    """The console script: an expected failure is one line, without a trace."""
    from proxy.errors import ProxyError

    configure_logging()
    try:
        app()
    except (UnreadSettings, StoreError, ProxyError) as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(f"pawl: {message}", file=sys.stderr)
    raise SystemExit(2)


# Which episodes a command is about.
Since = Annotated[
    datetime | None, typer.Option(help="Only episodes with a call at or after this time.")
]
OfAgent = Annotated[str | None, typer.Option(help="Only episodes with calls of this agent.")]
OfPolicy = Annotated[str | None, typer.Option(help="Only episodes with calls of this policy.")]


@app.command()
def proxy(
    workers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Processes that take calls (PAWL_WORKERS).")
    ] = None,
) -> None:
    """Serve: pass calls on, record them, take feedback."""
    from pawl.serving.supervisor import serve
    from proxy.settings import ProxySettings

    settings = read_settings(ProxySettings)
    if workers is not None:
        settings = settings.model_copy(update={"workers": workers})
    try:
        asyncio.run(serve(settings))
    except OSError as error:
        _fail(
            f"{error.strerror or error}. If a port is taken, stop what holds it, "
            "or set PAWL_LISTEN and PAWL_ADMIN_LISTEN."
        )


@app.command()
def trainer(
    once: Annotated[bool, typer.Option("--once", help="Stop after one update.")] = False,
) -> None:
    """Train: poll the store, assign credit, update the adapter, publish it."""
    from trainer.errors import TrainerError
    from trainer.recipe import load_recipe
    from trainer.settings import TrainerSettings

    settings = read_settings(TrainerSettings)
    try:
        # Before torch is imported: a mistyped key is told at once.
        load_recipe(settings.recipe)
        from trainer.run import train

        asyncio.run(train(settings, once=once))
    except TrainerError as error:
        _fail(str(error))


@app.command()
def up() -> None:
    """Run the local stack: PostgreSQL, vLLM, proxy and trainer. Ctrl-C stops all of it."""
    from pawl.stack.preflight import NotReady
    from pawl.stack.up import run_stack

    try:
        asyncio.run(run_stack(read_settings(StackSettings)))
    except NotReady as error:
        _fail(str(error))


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="Folder or name of another model than the packaged one.")
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="Learner and numbers: a packaged recipe's name, or a TOML file.")
    ] = "demo",
    minutes: Annotated[float, typer.Option(min=1, help="Stop learning after this long.")] = 12.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the questions and the adapter.")] = 0,
    var: Annotated[Path, typer.Option(help="Where results and logs go.")] = Path("var/demo"),
) -> None:
    """The whole loop on this machine: an unchanged agent gets better while it works."""
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
        print("pawl: stopped; everything the demo started is down.", file=sys.stderr)
        raise SystemExit(130) from None


@app.command()
def export(
    since: Since = None,
    agent: OfAgent = None,
    policy: OfPolicy = None,
    out: Annotated[Path | None, typer.Option(help="A file; standard output if left out.")] = None,
) -> None:
    """Write what was recorded as JSON lines, one episode each, oldest first."""
    from pawl.export import Selection

    chosen = Selection(since=_with_zone(since), agent=agent, policy=policy)
    asyncio.run(_export(read_settings(StackSettings), chosen, out))


def _with_zone(moment: datetime | None) -> datetime | None:
    """A time without a zone is the machine's own."""
    return moment.astimezone() if moment is not None and moment.tzinfo is None else moment


async def _export(settings: StackSettings, chosen: object, out: Path | None) -> None:
    from pawl.export import Selection, export
    from pawl.stack.database import open_engine

    assert isinstance(chosen, Selection)
    async with open_engine(settings) as engine:
        if out is None:
            await export(engine, chosen, sys.stdout.buffer)
            return
        with out.open("wb") as file:
            count = await export(engine, chosen, file)
    print(f"{count} episodes written to {out}", file=sys.stderr)


@app.command()
def judge(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After `--`: a program (PAWL_JUDGE_COMMAND), run once an episode."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Or a model, with --rubric.")] = None,
    rubric: Annotated[Path | None, typer.Option(help="A text file: what is good work?")] = None,
    base_url: Annotated[
        str | None, typer.Option(help="The model's server, with its /v1 (PAWL_UPSTREAM_URL).")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="The model's.")] = 0.0,
    max_chars: Annotated[
        int, typer.Option(min=200, help="So much of a transcript is shown to the model.")
    ] = 60_000,
    name: Annotated[
        str | None, typer.Option(help="Under which it is remembered what it was asked.")
    ] = None,
    quiet: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds without a call: over (PAWL_JUDGE_QUIET_S, 600)."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="At once (PAWL_JUDGE_CONCURRENCY, 4).")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.01, help="Seconds each (PAWL_JUDGE_TIMEOUT_S, 60).")
    ] = None,
    attempts: Annotated[int, typer.Option(min=1, help="So often one may fail.")] = 5,
    once: Annotated[bool, typer.Option("--once", help="Stop when none is left: for cron.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Ask also about those it could not judge before.")
    ] = False,
    since: Since = None,
    agent: OfAgent = None,
    policy: OfPolicy = None,
    feedback_url: Annotated[
        str | None, typer.Option(help="Where answers go; unset: the proxy at PAWL_LISTEN.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: counts, in JSON.")] = False,
) -> None:
    """Have finished episodes judged that nobody scored, and the answers posted as feedback."""
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
        told = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in tally.items())
        print(f"episodes: {told}", file=sys.stderr)
    if tally["failed"]:
        raise SystemExit(1)


@app.command()
def credit(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE.jsonl]",
            help="Episodes, one a line, as `pawl export` writes them; - for standard input.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="By which recipe: a TOML file, or a packaged one's name. Left out: `default`."
        ),
    ] = None,
    update: Annotated[
        str | None,
        typer.Option(help="Instead of a file an update that ran: the version it made, or its id."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Whose version, where several policies have it.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON lines on a terminal too, instead of a table.")
    ] = False,
) -> None:
    """Say what each transition is worth in an update's loss, and why it is not trained."""
    from pawl.credit import explain_file, write
    from trainer.errors import TrainerError
    from trainer.recipe import load_recipe

    if (file is None) == (update is None):
        _fail("name a file of episodes, - for standard input, or --update; one of them")
    if update is not None and recipe is not None:
        _fail("an update is explained by the recipe that it had: leave out --recipe")
    try:
        if update is not None:
            settings = read_settings(StackSettings)
            found = asyncio.run(_explain_update(settings, _version_or_id(update), policy))
        else:
            refuse_unread()
            found = explain_file(str(file), load_recipe(recipe or "default"))
    except TrainerError as error:
        _fail(str(error))
    write(found, as_json=as_json)


def _version_or_id(text: str) -> int | UUID:
    try:
        return int(text) if text.isdecimal() else UUID(text)
    except ValueError:
        _fail(f"--update is a version's number or an update's id, not {text!r}")


async def _explain_update(
    settings: StackSettings, which: int | UUID, policy: str | None
) -> "Explained":
    from pawl.past import explain_update
    from pawl.stack.database import open_engine

    async with open_engine(settings) as engine:
        return await explain_update(engine, which, policy)


@app.command()
def spool(
    replay: Annotated[
        bool, typer.Option("--replay", help="Try to store the dead letters again.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For a script.")] = False,
) -> None:
    """Show what waits on disk to be stored, and what could not be."""
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
    revision: Annotated[str, typer.Argument(help="Where to; `head` is the newest.")] = "head",
    down: Annotated[bool, typer.Option("--down", help="Go back to `revision`.")] = False,
) -> None:
    """Bring the database's schema to a revision."""
    from store.migrate import downgrade, upgrade

    settings = read_settings(StackSettings)

    async def run() -> None:
        from pawl.stack.database import open_database

        async with open_database(settings) as url:
            await (downgrade(url, revision) if down else upgrade(url, revision))

    asyncio.run(run())


if __name__ == "__main__":
    main()
