"""Six databases like those of businesses: ten tables each, with foreign keys and rows.

In `databases.json` a table is a list: a word for its rows, then its columns without the key `id`. A
column has numbers of a range, some words (`|`), names from a list of `words`, or foreign keys
(`>`). Each table comes after the tables to which it refers.
"""

from __future__ import annotations

import functools
import json
import random
import re
import sqlite3
from pathlib import Path
from typing import NamedTuple

from company import company, make_read_only

DATA = json.loads(Path(__file__).with_name("databases.json").read_text())
SCHEMAS, WORDS = DATA["schemas"], DATA["words"]
ROWS = (10, 60)


class Column(NamedTuple):
    """A column; apart from `name`, only the field of its kind is set."""

    name: str
    numbers: tuple[int, int] | None = None
    words: tuple[str, ...] = ()
    names: str = ""
    key_of: str = ""


class Table(NamedTuple):
    """A table; `rows` is the word for its rows in questions."""

    name: str
    rows: str
    columns: tuple[Column, ...]

    @property
    def name_column(self) -> Column:
        """Return the column with the rows' names, or a column without a name if there is none."""
        return next((one for one in self.columns if one.names), Column(""))

    def of_kind(self, kind: str) -> list[Column]:
        return [one for one in self.columns if getattr(one, kind)]


@functools.cache
def tables(schema: str) -> dict[str, Table]:
    """Return the tables of a schema, by name."""
    return {
        name: Table(name, rows, tuple(map(read_column, columns)))
        for name, (rows, *columns) in SCHEMAS[schema].items()
    }


def read_column(text: str) -> Column:
    name, mark, rest = re.split("([:>])", text, maxsplit=1)
    if mark == ">":
        return Column(name, key_of=rest)
    if numbers := re.fullmatch(r"(\d+)-(\d+)", rest):
        return Column(name, numbers=(int(numbers[1]), int(numbers[2])))
    return Column(name, words=tuple(rest.split("|"))) if "|" in rest else Column(name, names=rest)


def create(schema: str) -> str:
    """Return the statements that create a schema's tables, as the agents see them."""
    return "\n".join(create_table(table) for table in tables(schema).values())


def create_table(table: Table) -> str:
    columns = ["id INTEGER PRIMARY KEY"]
    for one in table.columns:
        if one.key_of:
            columns.append(f"{one.name} INTEGER REFERENCES {one.key_of}(id)")
        else:
            columns.append(f"{one.name} {'INTEGER' if one.numbers else 'TEXT'}")
    return f"CREATE TABLE {table.name} ({', '.join(columns)});"


def database(schema: str | None) -> sqlite3.Connection:
    """Return a read-only database in memory; for None, that of the small company."""
    if schema is None:
        return company()
    rng, db = random.Random(schema), sqlite3.connect(":memory:")
    db.executescript(create(schema))
    sizes: dict[str, int] = {}
    for table in tables(schema).values():
        sizes[table.name] = rng.randint(*ROWS) if table.of_kind("key_of") else rng.randint(8, 12)
        named = names(table, sizes[table.name], rng)
        for number in range(sizes[table.name]):
            values = [value(one, sizes, rng, named[number]) for one in table.columns]
            marks = ", ".join("?" * (len(values) + 1))
            db.execute(f"INSERT INTO {table.name} VALUES ({marks})", (number + 1, *values))
    db.commit()
    make_read_only(db)
    return db


def names(table: Table, count: int, rng: random.Random) -> list[str]:
    """Return different names for the rows of a table."""
    kind = table.name_column.names or "thing"
    if kind == "person":
        whole = [f"{first} {last}" for first in WORDS["first"] for last in WORDS["last"]]
        return rng.sample(whole, count)
    # If there are not enough names of one word, take names of two words.
    second = [
        word
        for other in ("town", "firm", "goods", "thing")
        if other != kind
        for word in WORDS[other]
    ]
    known = [*WORDS[kind], *(f"{word} {end}" for end in second for word in WORDS[kind])]
    return rng.sample(known[: max(count, len(WORDS[kind]))], count)


def value(column: Column, sizes: dict[str, int], rng: random.Random, name: str) -> int | str:
    if column.numbers:
        return rng.randint(*column.numbers)
    if column.key_of:
        return rng.randint(1, sizes[column.key_of])
    return rng.choice(column.words) if column.words else name
