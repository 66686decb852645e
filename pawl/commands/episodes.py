"""`pawl export` and `pawl episodes delete`: write or delete recorded episodes."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Final
from uuid import UUID

import msgspec
import typer
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl import export as exporting
from pawl.commands.common import (
    OfAgent,
    OfPolicy,
    OfTenant,
    Since,
    check_parent_folder,
    checked_tenant,
    fail,
    run_with_engine,
    with_flags,
    with_zone,
)
from pawl.settings import read_settings
from proxy.ingester.removing import count_waiting_deleted, dead_letters_in, remove_letters
from proxy.settings import ProxySettings
from store.deleting import Receipt, delete_episode, mark_deleted, receipt_of_deleted
from store.errors import Damaged, StoreError
from store.files import atomic_file
from store.records import Record
from store.selecting import FoundEpisodes, Selection, find_named_episodes, select_episodes
from store.tenants import DEFAULT, bare, scoped

POLL_S: Final = 0.5
# Names that a message shows.
MAX_SHOWN_NAMES: Final = 5

app = typer.Typer(no_args_is_help=True, help="Delete recorded episodes from everywhere.")


def export(
    since: Since = None,
    agent: OfAgent = None,
    policy: OfPolicy = None,
    tenant: OfTenant = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: standard output.")
    ] = None,
    hold_out: Annotated[
        int | None,
        typer.Option(
            "--hold-out",
            metavar="N",
            min=1,
            help="Write N recorded tasks instead, for `pawl rollout` and `pawl evaluate`; their "
            "episodes are never trained on.",
        ),
    ] = None,
) -> None:
    """Write recorded episodes as JSON lines, one episode each, oldest first.

    The `fates` of an episode say for each policy what became of it: it is `trained` or `untrained`
    with a `reason`, in an `update`; `scored`, and waits for one; or still `open`, `unscored`,
    `failed` or `quarantined`.

    With --hold-out a line is a task: its `id`, and as its `question` the last user message of its
    episode's first call. All recorded episodes of these tasks become evaluation, for good. A task
    of which an update has claimed an episode is not chosen.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR); nothing but by
    --hold-out is changed in it. Status 2: an episode cannot be read back; each such episode is
    named with the reason, and all others are written; or --hold-out finds no task.
    """
    selection = Selection(since=with_zone(since), agent=agent, policy=policy, tenant=tenant)
    check_parent_folder("--out", out)
    write, what = exporting.export, "episodes"
    if hold_out is not None:
        write, what = partial(exporting.hold_out, most=hold_out), "held-out tasks"
    if out is None:
        run_with_engine(lambda engine: write(engine, selection, sys.stdout.buffer))
        return
    damaged = None
    with atomic_file(out) as file:
        try:
            count = run_with_engine(lambda engine: write(engine, selection, file))
        except Damaged as error:
            # Raised after the file is complete, as all other episodes are written.
            damaged = error
    if damaged is not None:
        raise damaged
    print(f"{count} {what} written to {out}", file=sys.stderr)


class DeleteFlags(Record, frozen=True, kw_only=True):
    """The arguments of `pawl episodes delete`."""

    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[EPISODE]...", help="Keys or ids of episodes.", show_default=False),
    ] = None
    task: Annotated[
        str | None, typer.Option(help="Instead of names: all episodes of this task.")
    ] = None
    prefix: Annotated[
        str | None,
        typer.Option(help="Instead of names: all whose key begins so, such as a user's name."),
    ] = None
    since: Annotated[
        datetime | None,
        typer.Option(help="Instead of names: all whose last call was at or after this time."),
    ] = None
    before: Annotated[
        datetime | None,
        typer.Option(help="Instead of names: all whose last call was before this time."),
    ] = None
    tenant: Annotated[
        str,
        typer.Option(
            callback=checked_tenant,
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
@with_flags(DeleteFlags)
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
    if run_with_engine(lambda engine: _delete(engine, flags, selection)):
        raise SystemExit(1)


def _selection(flags: DeleteFlags) -> Selection | None:
    """Return the selection that the options make, or None without such options."""
    selection = Selection(
        tenant=flags.tenant,
        task=flags.task,
        prefix=flags.prefix,
        since=with_zone(flags.since),
        before=with_zone(flags.before),
    )
    return None if selection == Selection(tenant=flags.tenant) else selection


async def _delete(engine: AsyncEngine, flags: DeleteFlags, selection: Selection | None) -> int:
    """Delete episodes, and print each receipt; return how many of their records are left."""
    spool_dir = read_settings(ProxySettings).spool_dir
    as_lines = flags.as_json or not sys.stdout.isatty()
    names = [scoped(flags.tenant, name) for name in flags.names or ()]
    chosen = await choose_episodes(engine, names, selection, marking=flags.unrecorded)
    async for kept in delete_episodes(engine, spool_dir, chosen, dry=flags.dry_run):
        receipt = without_tenant(kept)
        line = msgspec.json.encode(receipt).decode() if as_lines else None
        print(line or describe_receipt(receipt, dry=flags.dry_run), flush=True)
    left = 0 if flags.dry_run else await wait_until_drained(engine, spool_dir, flags.patience_s)
    if left:
        print(
            f"{left} records of deleted episodes still wait in {spool_dir}: the ingester of "
            "`pawl proxy` removes them; start it, or look again once it is not busy",
            file=sys.stderr,
        )
    return left


class UnknownEpisodes(StoreError):
    """No recorded episode has these names; nothing was deleted."""


async def choose_episodes(
    engine: AsyncEngine, names: Sequence[str], selection: Selection | None, *, marking: bool
) -> FoundEpisodes:
    """Return the episodes with these names, which include the tenant, and those of a selection.

    With `marking`, unknown names are returned too, to be marked as deleted.

    Raises:
        UnknownEpisodes: a name is not recorded, and `marking` is false.
    """
    async with engine.connect() as connection:
        chosen = await find_named_episodes(connection, names)
        if chosen.unknown and not marking:
            shown = ", ".join(repr(bare(name)) for name in chosen.unknown[:MAX_SHOWN_NAMES])
            raise UnknownEpisodes(
                f"{len(chosen.unknown)} of these names are not recorded ({shown}), and nothing was "
                "deleted: correct them, or add --unrecorded if their calls may still wait in the "
                "spool of a proxy"
            )
        matching = [] if selection is None else await select_episodes(connection, selection)
    return msgspec.structs.replace(chosen, wholes=(*chosen.wholes, *matching))


async def delete_episodes(
    engine: AsyncEngine, spool_dir: Path, chosen: FoundEpisodes, *, dry: bool
) -> AsyncIterator[Receipt]:
    """Delete the chosen episodes one by one, and yield each receipt once its episode is deleted.

    With `dry` each deletion is rolled back, so the receipts are those of a real deletion; dead
    letters are kept.
    """
    for name, whole in chosen.deleted_before.items():
        async with engine.connect() as connection:
            receipt = await receipt_of_deleted(connection, name, whole)
        yield await _remove_letters(engine, spool_dir, receipt, dry=dry)
    targets: list[UUID | str] = [*chosen.wholes, *chosen.unknown]
    for target in targets:
        async with engine.connect() as connection:
            if isinstance(target, UUID):
                deleted = await delete_episode(connection, target)
            else:
                deleted = await mark_deleted(connection, target)
            await (connection.rollback() if dry else connection.commit())
        if deleted is not None:
            yield await _remove_letters(engine, spool_dir, deleted, dry=dry)


async def _remove_letters(
    engine: AsyncEngine, spool_dir: Path, receipt: Receipt, *, dry: bool
) -> Receipt:
    """Remove an episode's dead letters on this machine, and add their number to the receipt."""
    if dry:
        return receipt
    names = receipt.keys or (receipt.episode,)
    async with engine.connect() as connection:
        letters = await remove_letters(connection, dead_letters_in(spool_dir), names)
    return msgspec.structs.replace(receipt, removed={**receipt.removed, "dead_letters": letters})


async def wait_until_drained(engine: AsyncEngine, spool_dir: Path, within_s: float) -> int:
    """Wait until no segment on this machine has records of deleted episodes.

    Return how many such records are left after at most `within_s` seconds.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + within_s
    while True:
        async with engine.connect() as connection:
            left = await count_waiting_deleted(connection, spool_dir)
        if not left or clock() >= deadline:
            return left
        await asyncio.sleep(POLL_S)


def without_tenant(receipt: Receipt) -> Receipt:
    """Return a receipt whose names have no tenant, as clients gave them."""
    return msgspec.structs.replace(
        receipt,
        episode=bare(receipt.episode),
        keys=tuple(map(bare, receipt.keys)),
        linked=tuple(map(bare, receipt.linked)),
    )


def describe_receipt(receipt: Receipt, *, dry: bool) -> str:
    """Return a receipt as a line of text."""
    if receipt.state == "marked":
        return f"{receipt.episode}: not recorded; its calls and feedback will not be stored"
    done = {"deleted": "would be deleted" if dry else "deleted", "deleted_before": "deleted before"}
    counts = [f"{number} {table}" for table, number in receipt.removed.items() if number]
    line = f"{receipt.episode}: {done[receipt.state]}"
    line += f" ({', '.join(counts)})" if counts else ""
    if receipt.trained:
        carried = receipt.carried_by
        line += f"; trained on by {', '.join(receipt.trained)}, carried by {len(carried)} versions"
        line += " (`pawl policies retrain` starts again before them)"
    if receipt.linked:
        line += f"; linked with {', '.join(receipt.linked[:MAX_SHOWN_NAMES])}, not deleted"
    return line
