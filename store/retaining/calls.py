"""Remove a tenant's outdated calls row by row, from days that are kept for other tenants."""

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from store.deleting.delete import rewrite
from store.retaining.periods import Cuts
from store.retaining.tenant_cuts import id_at

# Most calls that one transaction removes, unless a single episode has more.
MOST_CALLS: Final = 1000

_COUNTS: Final = """
    SELECT episode_id, count(*) FROM transitions WHERE episode_id = ANY($1) GROUP BY 1
"""
_CALLS: Final = "SELECT id FROM transitions WHERE episode_id = ANY($1) AND id < $2"
_DELETE: Final = "DELETE FROM transitions WHERE episode_id = ANY($1) AND id < $2"
# Until all ingesters have seen that a day is outdated, and after it, no call of it is stored.
_NOTE: Final = """
    INSERT INTO outdated_days (tenant, day) SELECT unnest($1::text[]), unnest($2::date[]) - 1
    ON CONFLICT (tenant) DO UPDATE SET day = greatest(outdated_days.day, excluded.day)
"""


async def few(driver: Any, cuts: Cuts, groups: Mapping[UUID, tuple[str, Sequence[UUID]]]) -> int:
    """Return how many of these groups of episodes, from the first on, one transaction removes.

    Args:
        driver: the driver's connection.
        cuts: which tenants' calls are removed row by row; those of others do not count.
        groups: each one's tenant, and the ids of its parts.
    """
    apart = [part for tenant, parts in groups.values() if cuts.apart(tenant) for part in parts]
    counts = dict(await driver.fetch(_COUNTS, apart)) if apart else {}
    total = 0
    for number, (_, parts) in enumerate(groups.values()):
        total += sum(counts.get(part, 0) for part in parts)
        if number and total > MOST_CALLS:
            return number
    return len(groups)


async def note(driver: Any, cuts: Cuts, tenants: Sequence[str]) -> None:
    """Note which days of these tenants are outdated: no call of them is stored any more."""
    await driver.execute(_NOTE, tenants, [cuts.before(tenant) for tenant in tenants])


async def remove_calls(
    connection: Any, driver: Any, cuts: Cuts, parts_of: Mapping[str, Sequence[UUID]]
) -> int:
    """Remove the outdated calls of episodes, where their days are kept for others; return how many.

    What other episodes add to such a call is stored whole first.

    Args:
        connection: the connection, in a transaction that keeps batches from being stored.
        driver: the driver's connection below it.
        cuts: which day each tenant's kept records begin with.
        parts_of: the ids of episodes, by tenant.
    """
    removed = 0
    for tenant, parts in parts_of.items():
        if cuts.apart(tenant):
            before = id_at(cuts.before(tenant))
            calls = [row[0] for row in await driver.fetch(_CALLS, parts, before)]
            await rewrite(connection, driver, parts, calls)
            await driver.execute(_DELETE, parts, before)
            removed += len(calls)
    return removed
