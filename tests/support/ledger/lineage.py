"""Make the versions of a policy as updates do: each with the one that it was trained from."""

from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import new_id
from store.schema.trained import updates
from store.updates.policies import add_version, ensure_base


async def trained(connection: AsyncConnection, *parents: int, name: str = "m") -> None:
    """Begin a policy, and add a written version for each of `parents`, numbered from 1."""
    await ensure_base(connection, name, "m")
    for number, parent in enumerate(parents, 1):
        made = {"id": new_id(), "policy": name, "parent_version": parent, "version": number}
        await connection.execute(insert(updates).values(**made, state="done", recipe={}))
        await add_version(connection, name, number, f"/{name}/{number}", made["id"])
