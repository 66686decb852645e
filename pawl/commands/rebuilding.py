"""Define `pawl policies rebuild`: train a policy's line again without some episodes."""

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from pawl.commands.common import OfTenant, fail, require_torch
from pawl.commands.flags import takes
from pawl.imports import large_imports
from pawl.settings import read_settings
from store.records import Record

if TYPE_CHECKING:
    from pawl.policies.rebuilding import Forecast
    from store.rebuilding.choosing import Query
    from trainer.rebuilding.rebuild import Result, Wish
    from trainer.settings import TrainerSettings

Without = Annotated[
    list[str] | None,
    typer.Option(
        metavar="QUERY",
        help="Leave out an episode, by key or id, or those that meet all of FIELD=VALUE,...: task, "
        "prefix, agent, key, since, before, scored-since, scored-before. May be given several "
        "times.",
    ),
]


class RebuildFlags(Record, frozen=True, kw_only=True):
    """Hold what may be written after `pawl policies rebuild`."""

    name: Annotated[str, typer.Argument(help="Name of the policy.", show_default=False)]
    without: Without = None
    leave_missing: Annotated[
        bool,
        typer.Option(
            "--leave-out-missing",
            help="Leave out as well what was deleted, or cannot be read any more.",
        ),
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before it begins.")] = False
    tenant: OfTenant = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON on a terminal too, not text.")
    ] = False


@takes(RebuildFlags)
def rebuild(flags: RebuildFlags) -> None:
    """Train a policy's line again without some episodes, and serve what it comes to.

    For the day on which rewards turn out to be wrong. The updates of the line are done again in
    their order, each on what it claimed but for what is left out, and the last version is probed,
    published, and serves, without a trial where the recipe has a gate; the old ones are retired.
    `since` and `before` are about an episode's calls, `scored-since` and `scored-before` about the
    times of its feedback, `key` about the API key, by name or id, that a call of it or something
    said about it came with: of what was recorded before the ledger kept keys, none is known. Run it
    where the policy's trainer runs, with the trainer's settings (PAWL_SEED too), while that is
    stopped. After a kill, run it again: it goes on.

    Status 2: it cannot be rebuilt, or was rejected, or a trainer works on the policy.
    """
    from pawl.policies.queries import read_queries
    from store.policy_table import open_policies
    from trainer.chosen import importing_policy
    from trainer.errors import TrainerError
    from trainer.settings import TrainerSettings

    queries = read_queries(flags.without or ())
    if not (queries or flags.leave_missing):
        fail(
            "nothing would be left out, so there is nothing to rebuild: say what to leave out, with"
            " --without or --leave-out-missing"
        )
    settings = read_settings(TrainerSettings)
    try:
        importing_policy(settings, open_policies(settings.policies), flags.name, flags.tenant)
        expected, words = asyncio.run(_look(settings, queries, flags))
        as_lines = flags.as_json or not sys.stdout.isatty()
        if flags.dry_run:
            print(msgspec.json.encode(expected).decode() if as_lines else words)
            return
        print(words, file=sys.stderr)
        _agree(flags.yes)
        with large_imports():
            require_torch()
            from trainer.rebuilding.rebuild import Wish

        wish = Wish(queries=queries, leave_missing=flags.leave_missing)
        result, words = asyncio.run(_rebuild(settings, flags.name, wish))
    except TrainerError as error:
        fail(str(error))
    print(msgspec.json.encode(result).decode() if flags.as_json else words)


def _agree(yes: bool) -> None:
    """Ask whether to begin, unless that was said."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail("nobody can be asked whether to begin, as standard input is no terminal: add --yes")
    if not typer.confirm("Begin?", err=True):
        raise SystemExit(2)


async def _look(
    settings: "TrainerSettings", queries: "tuple[Query, ...]", flags: RebuildFlags
) -> "tuple[Forecast, str]":
    from pawl.policies.lookup import policy_versions
    from pawl.policies.rebuilding import as_text, forecast
    from pawl.stack.database import open_engine
    from store.rebuilding.outlook import outlook
    from trainer.rebuilding.resuming import furthest, needed

    async with open_engine(settings) as engine, engine.connect() as connection:
        await policy_versions(connection, flags.name, flags.tenant)
        seen = await outlook(connection, flags.name, queries, leave_missing=flags.leave_missing)
    done = furthest(seen.done, seen.line, settings.adapter_dir, flags.name)
    expected = forecast(flags.name, seen, done, needed(seen, done))
    return expected, as_text(expected)


async def _rebuild(settings: "TrainerSettings", name: str, wish: "Wish") -> "tuple[Result, str]":
    from pawl.policies.rebuilding import outcome, shown
    from pawl.stack.database import open_engine
    from trainer.rebuilding.rebuild import rebuild_policy

    async with open_engine(settings) as engine:
        with shown() as tell:
            result = await rebuild_policy(settings, engine, name, wish, tell)
    return result, outcome(result)
