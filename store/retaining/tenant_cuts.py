"""Put each tenant's first day that is kept into queries, by the names that rows have."""

from datetime import UTC, date, datetime, time
from typing import Any, Final
from uuid import UUID

from store.ids import lowest_id_at
from store.retaining.periods import Cuts
from store.tenants import DEFAULT

NOWHERE: Final = UUID(int=0)


def midnight(day: date) -> datetime:
    """Return when a day begins (UTC)."""
    return datetime.combine(day, time(), UTC)


def id_at(day: date | None) -> UUID | None:
    """Return the lowest id of a day; None: of no day."""
    return None if day is None else lowest_id_at(midnight(day))


def tenant_in(column: str) -> str:
    """Return the expression for whose a column's name is, as `store.tenants.tenant_of` says it."""
    separator = "E'\\x1f'"
    return (
        f"CASE WHEN strpos({column}, {separator}) > 1 THEN split_part({column}, {separator}, 1) "
        f"ELSE '{DEFAULT}' END"
    )


def with_cut(column: str) -> str:
    """Return a join that adds `cut.id` and `cut.at`, where the kept days of a name's tenant begin.

    Both are null where all of the tenant's days are kept. Parameters 1 to 5 are `parameters`.
    """
    return f"""
        LEFT JOIN unnest($1::text[], $2::uuid[], $3::timestamptz[]) AS own (tenant, id, at)
            ON own.tenant = {tenant_in(column)}
        CROSS JOIN LATERAL (
            SELECT CASE WHEN own.tenant IS NULL THEN $4::uuid ELSE own.id END AS id,
                CASE WHEN own.tenant IS NULL THEN $5::timestamptz ELSE own.at END AS at) AS cut
    """


def parameters(cuts: Cuts) -> tuple[Any, ...]:
    """Return the first five parameters of a query with such a join."""
    others = cuts.others
    return (
        list(cuts.of),
        [id_at(cut) for cut in cuts.of.values()],
        [None if cut is None else midnight(cut) for cut in cuts.of.values()],
        id_at(others),
        None if others is None else midnight(others),
    )
