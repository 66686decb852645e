"""Revision 0023: keys get a tenant, and no name that was stored before changes."""

from sqlalchemy import text

from store.connection.engine import make_engine
from store.keys.keys import create_key, key_ring, tenant_of_key
from store.schema.migrate import check, downgrade, upgrade
from store.write.ingest import Ingester
from tests.integration.store.migrations.test_migration_of_keys import rows
from tests.support.records import call, reward

OLD = (
    "INSERT INTO api_keys (id, name, hash, scopes)"
    " VALUES ('0123456789abcdef', 'old', '\\x00', '{infer,admin}')"
)


async def test_keys_from_before_are_the_default_tenants_and_names_stay(
    database_url: str,
) -> None:
    url = database_url
    engine = make_engine(url)
    await Ingester().store(engine, [call("e1", task="t"), reward(0.5, episode="e1")])
    await engine.dispose()
    await downgrade(url, "0022")
    before = await rows(url)
    assert len(before) == 1
    engine = make_engine(url)
    async with engine.begin() as connection:
        await connection.execute(text(OLD))
    await engine.dispose()

    await upgrade(url)
    await check(url)
    assert await rows(url) == before
    engine = make_engine(url)
    async with engine.begin() as connection:
        [old] = (await key_ring(connection)).grants
        assert (old.tenant, old.scopes) == ("default", ("infer", "admin"))
        new = await create_key(connection, "new", ("infer",), tenant="a")
        assert await tenant_of_key(connection, new.key) == "a"
    await engine.dispose()

    # Without tenants its key would be let in as the default one's.
    await downgrade(url, "0022")
    engine = make_engine(url)
    async with engine.connect() as connection:
        found = await connection.execute(text("SELECT name FROM api_keys WHERE revoked_at IS NULL"))
        assert list(found.scalars()) == ["old"]
    await engine.dispose()
    await upgrade(url)
    await check(url)
