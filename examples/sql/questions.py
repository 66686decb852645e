"""Make questions about the databases of `databases.py`, in three degrees, each with its query.

The first asks one table; the second one that another has keys of; the third groups, ranks, or goes
over two keys. Some schemas are held out whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from company import is_empty, rows_of
from databases import SCHEMAS, Column, Table, database, tables

HELD_OUT = ("airline", "theatre")
DEGREES = (1, 2, 3)
# An answer has at most so many rows.
MOST_ROWS = 40
Draft = tuple[str, str]


def said(column: Column) -> str:
    return column.name.replace("_", " ")


def singular(table: Table) -> str:
    return table.name.replace("_", " ")


def named_one(db: Any, table: Table, rng: random.Random) -> str:
    assert table.called is not None
    return str(rng.choice(rows_of(db, f"SELECT {table.called.name} FROM {table.name}"))[0])


def condition(table: Table, rng: random.Random, alias: str = "") -> Draft:
    """Return a condition on a column of a table, in words and in SQL."""
    column = rng.choice([*table.of_kind("numbers"), *table.of_kind("words")])
    if column.words:
        word = rng.choice(column.words)
        return f"{said(column)} is {word}", f"{alias}{column.name} = '{word}'"
    assert column.numbers is not None
    low, high = column.numbers
    number = rng.randint(low + (high - low) // 4, high - (high - low) // 4)
    word, sign = rng.choice((("above", ">"), ("below", "<")))
    return f"{said(column)} is {word} {number}", f"{alias}{column.name} {sign} {number}"


def first_degree(schema: dict[str, Table], db: Any, rng: random.Random) -> Draft:
    table = rng.choice([one for one in schema.values() if one.of_kind("numbers")])
    words, where = condition(table, rng)
    if table.called and rng.random() < 0.4:
        name = table.called
        return (
            f"List the {said(name)} of all {table.rows} whose {words}.",
            f"SELECT {name.name} FROM {table.name} WHERE {where}",
        )
    others = [one for one in table.of_kind("numbers") if not where.startswith(f"{one.name} ")]
    if not others or rng.random() < 0.5:
        return f"How many {table.rows} are there whose {words}?", (
            f"SELECT COUNT(*) FROM {table.name} WHERE {where}"
        )
    column = rng.choice(others)
    how, function = rng.choice((("average", "AVG"), ("largest", "MAX"), ("smallest", "MIN")))
    return (
        f"What is the {how} {said(column)} of all {table.rows} whose {words}?",
        f"SELECT {function}({column.name}) FROM {table.name} WHERE {where}",
    )


def pairs(schema: dict[str, Table]) -> list[tuple[Table, Column, Table]]:
    """Return tables with a key and the table that it is of, whose rows have names."""
    return [
        (child, key, schema[key.key_of])
        for child in schema.values()
        for key in child.of_kind("key_of")
        if schema[key.key_of].called
    ]


def second_degree(schema: dict[str, Table], db: Any, rng: random.Random) -> Draft:
    child, key, parent = rng.choice(pairs(schema))
    assert parent.called is not None
    joined = f"{child.name} c JOIN {parent.name} p ON c.{key.name} = p.id"
    words, where = condition(parent, rng, "p.")
    whose = f"whose {singular(parent)} has {words.replace(' is ', ' ', 1)}"
    kinds = rng.random()
    if kinds < 0.35:
        return f"How many {child.rows} are there {whose}?", (
            f"SELECT COUNT(*) FROM {joined} WHERE {where}"
        )
    if kinds < 0.7 and child.called:
        return (
            f"List the {said(child.called)} of all {child.rows} {whose}.",
            f"SELECT c.{child.called.name} FROM {joined} WHERE {where}",
        )
    name, numbers = named_one(db, parent, rng), child.of_kind("numbers")
    of_one = f"{joined} WHERE p.{parent.called.name} = '{name}'"
    if numbers:
        column, whole = rng.choice(numbers), f"the {child.rows} of the {singular(parent)} {name}"
        return f"What is the total {said(column)} of {whole}?", (
            f"SELECT SUM(c.{column.name}) FROM {of_one}"
        )
    return f"How many {child.rows} does the {singular(parent)} {name} have?", (
        f"SELECT COUNT(*) FROM {of_one}"
    )


def third_degree(schema: dict[str, Table], db: Any, rng: random.Random) -> Draft:
    kinds: list[Callable[[dict[str, Table], Any, random.Random], Draft]] = [
        ranked,
        grouped,
        over_two,
    ]
    return rng.choice(kinds)(schema, db, rng)


def ranked(schema: dict[str, Table], db: Any, rng: random.Random) -> Draft:
    child, key, parent = rng.choice(pairs(schema))
    assert parent.called is not None
    numbers = child.of_kind("numbers")
    what, order = f"the most {child.rows}", "COUNT(*)"
    if numbers and rng.random() < 0.5:
        column = rng.choice(numbers)
        what, order = (
            f"the highest total {said(column)} of its {child.rows}",
            f"SUM(c.{column.name})",
        )
    return (
        f"Which {singular(parent)} has {what}? Give its {said(parent.called)} alone.",
        f"SELECT p.{parent.called.name} FROM {child.name} c JOIN {parent.name} p"
        f" ON c.{key.name} = p.id GROUP BY p.id ORDER BY {order} DESC LIMIT 1",
    )


def grouped(schema: dict[str, Table], db: Any, rng: random.Random) -> Draft:
    child, key, parent = rng.choice(pairs(schema))
    assert parent.called is not None
    number = rng.randint(2, 6)
    return (
        f"List the {said(parent.called)} of each {singular(parent)} with more than {number}"
        f" {child.rows}.",
        f"SELECT p.{parent.called.name} FROM {child.name} c JOIN {parent.name} p"
        f" ON c.{key.name} = p.id GROUP BY p.id HAVING COUNT(*) > {number}",
    )


def over_two(schema: dict[str, Table], db: Any, rng: random.Random) -> Draft:
    ways = [
        (child, key, parent, upper, schema[upper.key_of])
        for child in schema.values()
        for key in child.of_kind("key_of")
        for parent in [schema[key.key_of]]
        for upper in parent.of_kind("key_of")
        if schema[upper.key_of].called
    ]
    child, key, parent, upper, top = rng.choice(ways)
    assert top.called is not None
    name = named_one(db, top, rng)
    return (
        f"How many {child.rows} are there whose {singular(parent)} belongs to the {singular(top)}"
        f" {name}?",
        f"SELECT COUNT(*) FROM {child.name} c JOIN {parent.name} p ON c.{key.name} = p.id"
        f" JOIN {top.name} t ON p.{upper.name} = t.id WHERE t.{top.called.name} = '{name}'",
    )


MAKERS = dict(zip(DEGREES, (first_degree, second_degree, third_degree), strict=True))


def is_sound(db: Any, sql: str) -> bool:
    """Return whether a query has one answer: something, no zero, and no two that rank alike."""
    rows = rows_of(db, sql)
    if is_empty(rows) or rows == [(0,)] or len(rows) > MOST_ROWS:
        return False
    if " LIMIT 1" not in sql:
        return True
    body, order = sql.split(" ORDER BY ")
    best = rows_of(
        db, f"SELECT {order.split(' DESC')[0]} AS n {body[body.index('FROM') :]} ORDER BY n DESC"
    )
    return len(best) < 2 or best[0] != best[1]


def questions(seed: int, split: str) -> Iterator[dict[str, object]]:
    """Yield different questions, the schemas and degrees by turns, for ever."""
    rng = random.Random(f"{split}-{seed}")
    schemas = [name for name in SCHEMAS if (name in HELD_OUT) == (split == "held-out")]
    known = {name: database(name) for name in schemas}
    asked = set[str]()
    while True:
        for degree in DEGREES:
            for schema in schemas:
                question, sql = MAKERS[degree](tables(schema), known[schema], rng)
                while question in asked or not is_sound(known[schema], sql):
                    question, sql = MAKERS[degree](tables(schema), known[schema], rng)
                asked.add(question)
                kind = f"degree-{degree}"
                yield {"schema": schema, "kind": kind, "question": question, "answer": sql}
