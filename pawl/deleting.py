"""Delete episodes from the ledger and from this machine's spool (`pawl episodes delete`)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from proxy.ingester.removing import letters_of, remove_letters, waiting
from store.deleting.delete import delete_episode, deleted_before, mark_deleted
from store.deleting.receipts import Receipt
from store.errors import StoreError
from store.selecting import Chosen, Selection, named, selected
from store.tenants import bare

LOOK_S: Final = 0.5
# Names that a message shows.
TOLD: Final = 5


class UnknownEpisodes(StoreError):
    """Report names that no recorded episode has; nothing was deleted."""


async def choose(
    engine: AsyncEngine, names: Sequence[str], selection: Selection | None, *, marking: bool
) -> Chosen:
    """Return what the names, or a selection, stand for; names are as they are kept.

    Raises:
        UnknownEpisodes: a name is not recorded, and such names are not to be marked.
    """
    async with engine.connect() as connection:
        chosen = await named(connection, names)
        if chosen.unknown and not marking:
            shown = ", ".join(repr(bare(name)) for name in chosen.unknown[:TOLD])
            raise UnknownEpisodes(
                f"{len(chosen.unknown)} of these names are not recorded ({shown}), and nothing was "
                "deleted: correct them, or add --unrecorded if their calls may still wait in the "
                "spool of a proxy"
            )
        matching = [] if selection is None else await selected(connection, selection)
    return msgspec.structs.replace(chosen, wholes=(*chosen.wholes, *matching))


async def delete(
    engine: AsyncEngine, spool_dir: Path, chosen: Chosen, *, dry: bool
) -> AsyncIterator[Receipt]:
    """Delete the chosen episodes one by one, and yield each one's receipt once it is deleted.

    With `dry` everything is done and nothing is kept, so that the receipts are those of a deletion;
    dead letters are left as they are.
    """
    for name, whole in chosen.deleted_before.items():
        async with engine.connect() as connection:
            receipt = await deleted_before(connection, name, whole)
        yield await _with_letters(engine, spool_dir, receipt, dry=dry)
    ones: list[UUID | str] = [*chosen.wholes, *chosen.unknown]
    for one in ones:
        async with engine.connect() as connection:
            receipt_of_one = await _delete_one(connection, one)
            await (connection.rollback() if dry else connection.commit())
        if receipt_of_one is not None:
            yield await _with_letters(engine, spool_dir, receipt_of_one, dry=dry)


async def _delete_one(connection: AsyncConnection, one: UUID | str) -> Receipt | None:
    if isinstance(one, UUID):
        return await delete_episode(connection, one)
    return await mark_deleted(connection, one)


async def _with_letters(
    engine: AsyncEngine, spool_dir: Path, receipt: Receipt, *, dry: bool
) -> Receipt:
    """Remove an episode's dead letters of this machine, and count them."""
    if dry:
        return receipt
    names = receipt.keys or (receipt.episode,)
    async with engine.connect() as connection:
        letters = await remove_letters(connection, letters_of(spool_dir), names)
    return msgspec.structs.replace(receipt, removed={**receipt.removed, "dead_letters": letters})


async def drained(engine: AsyncEngine, spool_dir: Path, within_s: float) -> int:
    """Wait until no segment of this machine has a record of a deleted episode.

    Return how many such records are left after `within_s` seconds.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + within_s
    while True:
        async with engine.connect() as connection:
            left = await waiting(connection, spool_dir)
        if not left or clock() >= deadline:
            return left
        await asyncio.sleep(LOOK_S)


def as_given(receipt: Receipt) -> Receipt:
    """Return a receipt with the names that clients gave."""
    return msgspec.structs.replace(
        receipt,
        episode=bare(receipt.episode),
        keys=tuple(map(bare, receipt.keys)),
        linked=tuple(map(bare, receipt.linked)),
    )


def as_text(receipt: Receipt, *, dry: bool) -> str:
    """Return a receipt as a line of text."""
    if receipt.state == "marked":
        return f"{receipt.episode}: not recorded; nothing of it will be stored"
    done = {"deleted": "would be deleted" if dry else "deleted", "deleted_before": "deleted before"}
    counts = [f"{number} {table}" for table, number in receipt.removed.items() if number]
    line = f"{receipt.episode}: {done[receipt.state]}"
    line += f" ({', '.join(counts)})" if counts else ""
    if receipt.trained:
        carried = receipt.carried_by
        line += f"; trained on by {', '.join(receipt.trained)}, carried by {len(carried)} versions"
        line += " (`pawl policies retrain` starts again before them)"
    if receipt.linked:
        line += f"; linked with {', '.join(receipt.linked[:TOLD])}, not deleted"
    return line
