"""Define `pawl export` and `pawl credit`, which show what was recorded and what it is worth."""

import asyncio
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from pawl.commands.common import OfAgent, OfPolicy, OfTenant, Since, fail, with_zone
from pawl.settings import StackSettings, read_settings, refuse_unread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sqlalchemy.ext.asyncio import AsyncEngine

    from pawl.crediting.explain import Explained
    from pawl.export import Selection


def export(
    since: Since = None,
    agent: OfAgent = None,
    policy: OfPolicy = None,
    tenant: OfTenant = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: standard output.")
    ] = None,
    curve: Annotated[
        bool,
        typer.Option(
            "--curve", help="Write the mean reward of evaluation of each version instead."
        ),
    ] = False,
) -> None:
    """Write recorded episodes as JSON lines, one episode each, oldest first.

    With --curve a line is a version of a policy, with its `episodes` of the `eval` split, how many
    of them are `scored`, their `mean` reward, and the 95 % interval from `low` to `high`.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR); nothing is changed
    in it. Status 2: an episode cannot be read back; each such episode is named with the reason,
    and all others are written; or --curve stands with an option that chooses episodes.
    """
    from pawl.export import Selection, export, export_curve

    if curve and any(option is not None for option in (since, agent)):
        fail(
            "--curve is about all evaluation episodes of a policy, so none can be chosen: leave out"
            " --since and --agent"
        )
    selection = Selection(since=with_zone(since), agent=agent, policy=policy, tenant=tenant)
    write, what = (export_curve, "versions") if curve else (export, "episodes")
    asyncio.run(_export(read_settings(StackSettings), selection, out, write, what))


async def _export(
    settings: StackSettings,
    selection: "Selection",
    out: Path | None,
    write: "Callable[[AsyncEngine, Selection, IO[bytes]], Awaitable[int]]",
    what: str,
) -> None:
    from pawl.stack.database import open_engine

    async with open_engine(settings) as engine:
        if out is None:
            await write(engine, selection, sys.stdout.buffer)
            return
        with out.open("wb") as file:
            count = await write(engine, selection, file)
    print(f"{count} {what} written to {out}", file=sys.stderr)


File = Annotated[
    str | None,
    typer.Argument(
        metavar="[FILE.jsonl]",
        help="File of episodes as `pawl export` writes them; - reads standard input.",
        show_default=False,
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        help="Recipe to assign credit by: path of a TOML file, or name of a packaged one; "
        "default: `default`."
    ),
]
Update = Annotated[
    str | None,
    typer.Option(
        help="Update to explain instead of a file: the number of the version that it made, "
        "or its id."
    ),
]
VersionOf = Annotated[
    str | None,
    typer.Option(help="With --update: policy of the version, if several have that number."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON lines on a terminal too, not a table.")
]


def credit(
    file: File = None,
    recipe: RecipeName = None,
    update: Update = None,
    policy: VersionOf = None,
    tenant: OfTenant = None,
    as_json: AsJson = False,
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
        fail("name a file of episodes, - for standard input, or --update: exactly one of them")
    if update is None and tenant is not None:
        fail("--tenant is for --update: a file has the episodes that it was written with")
    if update is not None and recipe is not None:
        fail("an update is explained by the recipe that it ran with: leave out --recipe")
    try:
        if update is not None:
            settings = read_settings(StackSettings)
            explained = asyncio.run(
                _explain_update(settings, _version_or_id(update), policy, tenant)
            )
        else:
            refuse_unread()
            explained = explain_file(str(file), load_recipe(recipe or "default"))
    except TrainerError as error:
        fail(str(error))
    write(explained, as_json=as_json)


def _version_or_id(text: str) -> int | UUID:
    try:
        return int(text) if text.isdecimal() else UUID(text)
    except ValueError:
        fail(f"--update is a version's number or an update's id, not {text!r}")


async def _explain_update(
    settings: StackSettings, which: int | UUID, policy: str | None, tenant: str | None
) -> "Explained":
    from pawl.crediting.past import explain_update
    from pawl.stack.database import open_engine

    async with open_engine(settings) as engine:
        return await explain_update(engine, which, policy, tenant)
