"""`pawl credit`: the credit of each call of a file, or of a past update."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer
from rich.table import Table

from pawl.commands.common import AsJson, OfTenant, fail, in_transaction, make_table, write_lines
from pawl.credit import explain_past
from pawl.settings import refuse_unknown_settings
from store.read.past import past_update
from store.settings import MAX_INT32
from trainer.credit.lines import CreditLine, credit_lines, read_lines
from trainer.errors import CreditLineError, TrainerError
from trainer.recipes.recipe import Recipe, load_recipe

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
    if (file is None) == (update is None):
        fail("name a file of episodes, - for standard input, or --update: exactly one of them")
    if update is None and tenant is not None:
        fail("--tenant is for --update: a file has the episodes that it was written with")
    if update is not None and recipe is not None:
        fail("an update is explained by the recipe that it ran with: leave out --recipe")
    try:
        if update is not None:
            named = _version_or_id(update)
            past = in_transaction(lambda connection: past_update(connection, named, policy, tenant))
            explained = explain_past(past)
            lines, notes = explained.lines, explained.notes
        else:
            refuse_unknown_settings()
            rules = load_recipe(recipe or "default")
            if rules.teacher is not None:
                fail("with this recipe a teacher gives each token its advantage: none is in a file")
            lines, notes = explain_file(str(file), rules), ()
    except TrainerError as error:
        fail(str(error))
    for note in notes:
        print(f"pawl: {note}", file=sys.stderr)
    write_lines(lines, credit_table, as_json=as_json)


def _version_or_id(text: str) -> int | UUID:
    try:
        named = int(text) if text.isdecimal() else UUID(text)
    except ValueError:
        named = MAX_INT32 + 1
    if isinstance(named, int) and named > MAX_INT32:
        fail(f"--update is a version's number or an update's id, not {text!r:.80}")
    return named


def explain_file(file: str, recipe: Recipe) -> list[CreditLine]:
    """Assign credit to the episodes in a file, or on standard input if `file` is `-`.

    Raises:
        CreditLineError: the file cannot be read, or a line is not an episode as `pawl export`
            writes it.
    """
    if file == "-":
        episodes = read_lines(sys.stdin.buffer, "standard input")
    else:
        try:
            with Path(file).open("rb") as lines:
                episodes = read_lines(lines, file)
        except OSError as error:
            raise CreditLineError(
                f"{file} cannot be read: {error.strerror}; name a file that `pawl export` wrote"
            ) from error
    return credit_lines(
        episodes, recipe.credit, recipe.imitation_rule, recipe.reward_rule, recipe.reward_range
    )


def credit_table(lines: Sequence[CreditLine]) -> Table:
    """Return the lines as a table for a terminal; an optional column only if a line has it."""
    names = [*CreditLine.__struct_fields__]
    for name in ("parts", "correction"):
        if not any(getattr(line, name) for line in lines):
            names.remove(name)
    numbers = {name for name in names if name.startswith("r_")} | {"advantage", "weight"}
    rows = ([_format_value(getattr(line, name)) for name in names] for line in lines)
    return make_table(names, rows, right=numbers, whole=numbers)


def _format_value(value: Any) -> Any:
    """Format a value for the table; the parts of a reward are shown as `METRIC VALUE`."""
    if not isinstance(value, dict):
        return value
    return ", ".join(f"{metric} {part:+.4g}" for metric, part in value.items())
