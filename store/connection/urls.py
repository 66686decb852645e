"""Check a database's URL without SQLAlchemy: its import would delay the start of every command."""

import re
from contextlib import suppress
from typing import Final

from store.errors import StoreError

BACKENDS: Final = ("postgresql", "postgres")
# As far as SQLAlchemy's own parser (`sqlalchemy.engine.url`) may refuse what it reads.
_PARTS: Final = re.compile(
    r"(?P<name>[\w+]+)://([^:/]*(:[^@]*)?@)?(\[[^/?]+\]|[^/:?]+)?(:(?P<port>[^/?]*))?"
)


def check_url(database_url: str) -> None:
    """Check that SQLAlchemy can read `database_url`, and that it names a PostgreSQL.

    Raises:
        StoreError: it is not a `postgresql://` URL, or its port is not a number.
    """
    parts = _PARTS.match(database_url)
    if parts is None:
        raise StoreError("DATABASE_URL must be a postgresql:// URL")
    backend = parts["name"].partition("+")[0]
    if backend not in BACKENDS:
        raise StoreError(f"DATABASE_URL must be a postgresql:// URL, not {backend}://")
    if parts["port"] is not None:
        with suppress(ValueError):
            int(parts["port"])
            return
        raise StoreError("DATABASE_URL must have a number as its port")
