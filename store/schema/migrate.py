"""Migrate the schema with Alembic, from code without a configuration file, on any PostgreSQL.

A revision's name says which processes may use the schema: `0003_serves_0002` is the third, and
serves processes that know the second or a later one; `0004` serves only processes that know the
fourth. As the name is stored in the database, a process knows whether it may use a newer schema.
"""

import re
from collections.abc import Callable
from importlib.resources import files
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from store.database import is_deadlock, make_engine
from store.errors import NewerSchema, StoreError

# Any process may migrate when it starts; this advisory lock lets one at a time do so.
MIGRATION_LOCK = 0x5041574C
# Running processes lock tables in orders of their own, so a migration may deadlock and is retried.
MOST_DEADLOCKS: Final = 50
_REVISION: Final = re.compile(r"(?P<number>\d+)(_serves_(?P<first>\d+))?", re.ASCII)


async def upgrade(database_url: str, revision: str = "head") -> None:
    """Upgrade the schema to `revision`; a newer schema that serves this version of Pawl stays.

    Raises:
        NewerSchema: a newer version of Pawl made the schema, and it does not serve this version.
        StoreError: there is no such revision.
    """

    def up(config: Config) -> None:
        if not _is_newer(config, may_serve=revision == "head"):
            command.upgrade(config, revision)

    await _run(database_url, up)


async def downgrade(database_url: str, revision: str) -> None:
    """Downgrade the schema to `revision`.

    Raises:
        NewerSchema: a newer version of Pawl made the schema, and only that version can downgrade
            it.
        StoreError: there is no such revision.
    """

    def down(config: Config) -> None:
        _is_newer(config, may_serve=False)
        command.downgrade(config, revision)

    await _run(database_url, down)


def _is_newer(config: Config, *, may_serve: bool) -> bool:
    """Return True if a newer version of Pawl made the schema, and it serves this version.

    Return False if this version knows the schema.

    Raises:
        NewerSchema: the schema is newer, and does not serve this version or `may_serve` is false.
    """
    present = MigrationContext.configure(config.attributes["connection"]).get_current_revision()
    script = ScriptDirectory.from_config(config)
    known = {revision.revision for revision in script.walk_revisions()}
    if present is None or present in known:
        return False
    head = script.get_current_head() or ""
    name = _REVISION.fullmatch(present)
    if may_serve and name and name["first"] and int(name["first"]) <= _number(head):
        return True
    raise NewerSchema(
        f"the database has the schema {present:.40}, and this version of Pawl knows {head} and "
        f"earlier ones: install the version that made it, or downgrade with that one, by `pawl "
        f"migrate --down {head}`"
    )


def _number(revision: str) -> int:
    name = _REVISION.fullmatch(revision)
    assert name is not None, f"{revision} is not named as a revision is"
    return int(name["number"])


async def _run(database_url: str, action: Callable[[Config], object]) -> None:
    config = Config()
    config.set_main_option("script_location", str(files("migrations")))
    engine = make_engine(database_url, limit_s=None)

    def migrate(connection: Connection) -> None:
        config.attributes["connection"] = connection
        try:
            action(config)
        except CommandError as error:
            raise StoreError(f"the schema cannot be migrated: {error}") from error

    try:
        for deadlocks in range(MOST_DEADLOCKS + 1):
            try:
                async with engine.begin() as connection:
                    lock = f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"
                    await connection.exec_driver_sql(lock)
                    await connection.run_sync(migrate)
                return
            except DBAPIError as error:
                if deadlocks == MOST_DEADLOCKS or not is_deadlock(error):
                    raise
    finally:
        await engine.dispose()
