"""Make records that two keepers store in batches, in the order of their making or any other."""

import random
from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncEngine

from store.records import SpoolRecord
from store.write.ingest import Ingester

MOST_AT_ONCE = 6


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
