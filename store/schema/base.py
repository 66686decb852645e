"""Define what all tables share: their metadata, the names of constraints, and types.

The schema is decided in docs/decisions/001-order-free-ledger.md and 001-order-free-ledger.md.
"""

from sqlalchemy import (
    CheckConstraint,
    DateTime,
    MetaData,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

When = DateTime(timezone=True)


def one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    """Make a CHECK constraint that restricts `column` to `values` (or NULL)."""
    quoted = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({quoted})", name=f"{column}_known")
