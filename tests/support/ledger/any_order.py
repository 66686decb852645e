"""Store records in batches of two ingesters, in the order of their making or any other."""

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.records import SpoolRecord
from store.write.ingest import Ingester

Seen = TypeVar("Seen")
MOST_AT_ONCE = 6
ORDERS = (False, True, True, True)
LEDGER = (
    "episodes",
    "transitions",
    "tool_events",
    "feedback",
    "feedback_requests",
    "consumptions",
    "provided_fingerprints",
    "needed_fingerprints",
    "links",
)


async def empty(engine: AsyncEngine, *also: str) -> None:
    """Remove what records left in the ledger, and all rows of further tables."""
    async with engine.begin() as connection:
        await connection.execute(text(f"TRUNCATE {', '.join(LEDGER + also)} CASCADE"))


async def store_in_batches(
    engine: AsyncEngine, records: Sequence[SpoolRecord], dice: random.Random, *, disorder: bool
) -> None:
    """Store all records in batches of random sizes; with `disorder` shuffled, and some again."""
    ingesters = [Ingester(), Ingester()]
    order = dice.sample(records, len(records)) if disorder else list(records)
    while order:
        size = dice.randint(1, MOST_AT_ONCE)
        batch, order = order[:size], order[size:]
        again = dice.sample(records, dice.randrange(3)) if disorder else []
        await dice.choice(ingesters).store(engine, batch + again)


async def same_in_any_order(
    engine: AsyncEngine,
    records: Sequence[SpoolRecord],
    dice: random.Random,
    look: Callable[[AsyncEngine], Awaitable[Seen]],
    *also: str,
) -> Seen:
    """Return what `look` sees of the records, once it is the same in any order of storing them.

    Between two orders the ledger is emptied, and the tables named in `also`.
    """
    seen = []
    for disorder in ORDERS:
        await store_in_batches(engine, records, dice, disorder=disorder)
        seen.append(await look(engine))
        await empty(engine, *also)
    assert seen[1:] == seen[:1] * (len(ORDERS) - 1)
    return seen[0]
