"""Write the page of the database: tables, columns, constraints and indexes."""

from collections.abc import Iterator
from typing import Any, Final

from alembic.script import ScriptDirectory
from sqlalchemy import CheckConstraint, Column, Index, Table, UniqueConstraint
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex

from store.schema.migrate import alembic_config
from store.schema.tables import metadata

from .columns import COLUMNS, TABLES
from .markdown import bullets, code, page, paragraph, table_with_notes

INTRODUCTION: Final = """
The schema in PostgreSQL, at migration `{head}`. `pawl migrate` brings a database to it, and
so does every command that opens the database. All ids are UUIDv7, so that they sort by time.
Enumerations are text with a CHECK. A column that may be null says so. To read recorded episodes,
prefer `pawl export`, which puts the parts of an episode and the shared prefixes of its calls
together.
"""
DIALECT: Final = postgresql.dialect()  # type: ignore[no-untyped-call]
HEAD: Final = ("column", "type", "meaning")


def database_page() -> str:
    """Return `database.md`."""
    return page(
        "Database",
        paragraph(INTRODUCTION.format(head=newest_migration())),
        *(_section(one) for _, one in sorted(metadata.tables.items())),
    )


def newest_migration() -> str:
    """Return the revision of the newest migration."""
    config = alembic_config("postgresql://127.0.0.1/pawl")
    return str(ScriptDirectory.from_config(config).get_current_head())


def meaning_of_table(table: Table) -> str:
    """Return what a table holds.

    Raises:
        KeyError: neither `store.schema` nor `scripts.reference.columns` says it.
    """
    return table.comment or TABLES[table.name]


def meaning_of_column(column: Column[Any]) -> str:
    """Return what a column holds.

    Raises:
        KeyError: neither `store.schema` nor `scripts.reference.columns` says it.
    """
    return column.doc or column.comment or COLUMNS[f"{column.table.name}.{column.name}"]


def _section(table: Table) -> str:
    rows = [(code(one.name), _type(one), _meaning(one)) for one in table.columns]
    blocks = [
        f"## `{table.name}`",
        paragraph(meaning_of_table(table)),
        table_with_notes(HEAD, rows),
        bullets(_rules(table)),
    ]
    return "\n\n".join(block for block in blocks if block)


def _type(column: Column[Any]) -> str:
    name = column.type.compile(dialect=DIALECT).lower()
    name = name.replace("timestamp with time zone", "timestamptz")
    return f"{name}, null" if column.nullable else name


def _meaning(column: Column[Any]) -> str:
    """Return a column's meaning, with the values that its CHECK allows and what it refers to."""
    parts = [meaning_of_column(column)]
    known = next(
        (values for name, values in _enumerations(column.table) if name == column.name), ""
    )
    if known:
        parts.append(f"One of {known}.")
    parts += [f"Refers to `{key.target_fullname}`." for key in column.foreign_keys]
    return " ".join(parts)


def _enumerations(table: Table) -> Iterator[tuple[str, str]]:
    """Yield each column that a CHECK holds to a list of values, with these values."""
    for one in _checks(table):
        name, found, values = one.partition(" IN ")
        if found:
            yield name, values.strip("()").replace("'", "`")


def _checks(table: Table) -> list[str]:
    checks = [one for one in table.constraints if isinstance(one, CheckConstraint)]
    return sorted(str(one.sqltext) for one in checks)


def _rules(table: Table) -> list[str]:
    """Return the primary key, other constraints and indexes of a table, one line each."""
    keys = [column.name for column in table.primary_key]
    unique = [
        ", ".join(column.name for column in one.columns)
        for one in table.constraints
        if isinstance(one, UniqueConstraint)
    ]
    return [
        *([f"Primary key: {code(', '.join(keys))}"] if keys else []),
        *(f"Unique: {code(columns)}" for columns in sorted(unique)),
        *(f"Check: {code(one)}" for one in _checks(table) if " IN " not in one),
        *(f"Index: {_index(one)}" for one in sorted(table.indexes, key=lambda one: str(one.name))),
    ]


def _index(index: Index) -> str:
    """Return an index as SQL without its name and table."""
    sql = " ".join(str(CreateIndex(index).compile(dialect=DIALECT)).split())
    unique = "unique " if index.unique else ""
    return unique + code(sql.partition(f" ON {index.table.name} ")[2].removeprefix("USING btree "))  # type: ignore[union-attr]
