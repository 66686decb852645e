"""Delete episodes as `pawl episodes delete` does, and search all that is stored for a text."""

import io
import json
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.export import export
from store.deleting import Receipt, delete_episode
from store.selecting import Selection, find_named_episodes

_COLUMNS = """
    SELECT relname, attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
    WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
        AND attnum > 0 AND NOT attisdropped ORDER BY 1, 2
"""
_HAS = """
    SELECT count(*) FROM {table} WHERE position(convert_to(CAST(:word AS text), 'UTF8') IN
        CASE WHEN pg_typeof({column}) = 'bytea'::regtype THEN CAST({column}::text AS text)::bytea
             ELSE convert_to({column}::text, 'UTF8') END) > 0
"""


async def deleted(engine: AsyncEngine, name: str) -> Receipt:
    """Delete the episode of this name."""
    async with engine.connect() as connection:
        [whole] = (await find_named_episodes(connection, [name])).wholes
    async with engine.begin() as connection:
        receipt = await delete_episode(connection, whole)
    assert receipt is not None
    return receipt


async def places_with(engine: AsyncEngine, word: str) -> list[str]:
    """Return each column of any table in which a value holds the word's bytes.

    A day's partition may be dropped meanwhile; its rows are seen through its table.
    """
    found = []
    async with engine.connect() as connection:
        for table, column in (await connection.execute(text(_COLUMNS))).all():
            query = text(_HAS.format(table=f'"{table}"', column=f'"{column}"'))
            if await connection.scalar(query, {"word": word}):
                found.append(f"{table}.{column}")
    return found


async def exported(engine: AsyncEngine, tenant: str | None = None) -> dict[str, Any]:
    """Return every episode, or a tenant's, as it is exported, by key."""
    out = io.BytesIO()
    await export(engine, Selection(tenant=tenant), out)
    return {line["episode"]: line for line in map(json.loads, out.getvalue().splitlines())}
