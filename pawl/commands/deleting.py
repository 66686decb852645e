"""Define `pawl episodes …`: delete recorded episodes, with a receipt for each."""

import asyncio
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from pawl.commands.common import a_tenant, fail, with_zone
from pawl.commands.flags import takes
from pawl.settings import StackSettings, read_settings
from store.records import Record
from store.tenants import DEFAULT, scoped

if TYPE_CHECKING:
    from store.selecting import Selection

app = typer.Typer(no_args_is_help=True, help="Delete recorded episodes from everywhere.")

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[EPISODE]...", help="Keys or ids of episodes.", show_default=False),
]

Task = Annotated[str | None, typer.Option(help="Instead of names: all episodes of this task.")]
Prefix = Annotated[
    str | None,
    typer.Option(help="Instead of names: all whose key begins so, such as a user's name."),
]
Since = Annotated[
    datetime | None,
    typer.Option(help="Instead of names: all whose last call was at or after this time."),
]
Before = Annotated[
    datetime | None,
    typer.Option(help="Instead of names: all whose last call was before this time."),
]


class DeleteFlags(Record, frozen=True, kw_only=True):
    """Hold what may be written after `pawl episodes delete`."""

    names: Names = None
    task: Task = None
    prefix: Prefix = None
    since: Since = None
    before: Before = None
    tenant: Annotated[
        str,
        typer.Option(
            callback=a_tenant,
            help="Whose episodes: names and selections are of this tenant alone.",
        ),
    ] = DEFAULT
    unrecorded: Annotated[
        bool,
        typer.Option(
            "--unrecorded",
            help="Names may be unknown: what is recorded of them later is not stored either.",
        ),
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the receipts, and delete nothing.")
    ] = False
    patience_s: Annotated[
        float, typer.Option("--wait", min=0, help="How long to wait for the spool, in seconds.")
    ] = 30.0
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines on a terminal too, not text.")
    ] = False


@app.callback()
def episodes() -> None:
    """Delete recorded episodes from everywhere."""


@app.command()
@takes(DeleteFlags)
def delete(flags: DeleteFlags) -> None:
    """Delete episodes: their calls, feedback, judgements and all else, with a receipt for each.

    Several of --task, --prefix, --since and --before select the episodes that meet all of them.
    Records of a deleted episode that arrive later (calls, feedback) are not stored. A receipt lists
    what was removed, and the versions that had been trained on the episode; the database still
    knows that it was consumed. Run it again after a kill: nothing is deleted twice.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR), and PAWL_SPOOL_DIR for
    the dead letters of this machine; ingesters elsewhere remove their own. Status 1: records of a
    deleted episode still wait in the spool, and `pawl proxy` has to run to remove them. Status 2: a
    name is not recorded; nothing is deleted then.
    """
    selection = _selection(flags)
    if (selection is not None) == bool(flags.names):
        fail(
            "the episodes to delete must be either named or selected: give names, or --task,"
            " --prefix, --since or --before; one of both"
        )
    if asyncio.run(_delete(flags, selection)):
        raise SystemExit(1)


def _selection(flags: DeleteFlags) -> "Selection | None":
    """Return which episodes are selected, or None if nothing selects any."""
    from store.selecting import Selection

    selection = Selection(
        tenant=flags.tenant,
        task=flags.task,
        prefix=flags.prefix,
        since=with_zone(flags.since),
        before=with_zone(flags.before),
    )
    return None if selection == Selection(tenant=flags.tenant) else selection


async def _delete(flags: DeleteFlags, selection: "Selection | None") -> int:
    """Print each receipt once its episode is deleted; return how many records wait."""
    from pawl.deleting import as_given, as_text, choose, delete, drained
    from pawl.stack.database import open_engine
    from proxy.settings import ProxySettings

    spool_dir = read_settings(ProxySettings).spool_dir
    as_lines = flags.as_json or not sys.stdout.isatty()
    names = [scoped(flags.tenant, name) for name in flags.names or ()]
    async with open_engine(read_settings(StackSettings)) as engine:
        chosen = await choose(engine, names, selection, marking=flags.unrecorded)
        async for kept in delete(engine, spool_dir, chosen, dry=flags.dry_run):
            receipt = as_given(kept)
            line = msgspec.json.encode(receipt).decode() if as_lines else None
            print(line or as_text(receipt, dry=flags.dry_run), flush=True)
        left = 0 if flags.dry_run else await drained(engine, spool_dir, flags.patience_s)
    if left:
        print(
            f"{left} records of deleted episodes still wait in {spool_dir}: the ingester of "
            "`pawl proxy` removes them; start it, or look again once it is not busy",
            file=sys.stderr,
        )
    return left
