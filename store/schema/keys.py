"""Define the table of API keys."""

from typing import Final

from sqlalchemy import (
    ARRAY,
    CheckConstraint,
    Column,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    text,
)

from store.schema.base import When, metadata
from store.tenants import DEFAULT

# The condition for a key that is not revoked.
STANDING: Final = "revoked_at IS NULL"

# A revoked key keeps its row: a database that ever had a key never serves anybody without one.
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    # Whose the key is: its bearer sees, scores and trains what is this tenant's alone.
    Column("tenant", Text, nullable=False, server_default=text(f"'{DEFAULT}'")),
    # SHA-256 of the whole key; the key itself is kept nowhere.
    Column("hash", LargeBinary, nullable=False),
    Column("scopes", ARRAY(Text), nullable=False),
    # Requests that may begin in a minute, and run at once; null: any number.
    Column("per_minute", Integer),
    Column("at_once", Integer),
    Column("created_at", When, nullable=False, server_default=text("now()")),
    Column("revoked_at", When),
    # Tokens of the calls that ended in a minute; null: any number.
    Column("tokens_per_minute", Integer),
    CheckConstraint("per_minute > 0 AND at_once > 0", name="limits_let_some_in"),
    CheckConstraint("tokens_per_minute > 0", name="tokens_let_some_in"),
    Index("uq_api_keys_name", "name", unique=True, postgresql_where=text(STANDING)),
)
