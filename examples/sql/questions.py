"""Make questions about the databases of `databases.py`, in three degrees, each with its query.

Questions of the first degree group, rank, or follow two keys. The second degree compares rows with
others of their group, ranks among some rows, or asks for rows without matching child rows. The
third counts missing rows as 0, asks for the second best, or groups over two keys. Whole schemas are
held out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from company import is_empty, rows_of
from databases import SCHEMAS, Column, Table, database, tables

HELD_OUT = ("airline", "theatre")
# An answer has at most this many rows.
MOST_ROWS = 40
Draft = tuple[str, str]


def spoken_name(column: Column) -> str:
    return column.name.replace("_", " ")


def singular(table: Table) -> str:
    return table.name.replace("_", " ")


def condition(table: Table, rng: random.Random, alias: str = "") -> Draft:
    """Return a random condition on a column of a table, in words and in SQL."""
    column = rng.choice([*table.of_kind("numbers"), *table.of_kind("words")])
    if column.words:
        word = rng.choice(column.words)
        return f"{spoken_name(column)} is {word}", f"{alias}{column.name} = '{word}'"
    assert column.numbers is not None
    low, high = column.numbers
    number = rng.randint(low + (high - low) // 4, high - (high - low) // 4)
    word, sign = rng.choice((("above", ">"), ("below", "<")))
    return f"{spoken_name(column)} is {word} {number}", f"{alias}{column.name} {sign} {number}"


def keyed_pairs(schema: dict[str, Table]) -> list[tuple[Table, Column, Table]]:
    """Return each table with a foreign key, the key, and its target, a table with named rows."""
    return [
        (child, key, schema[key.key_of])
        for child in schema.values()
        for key in child.of_kind("key_of")
        if schema[key.key_of].name_column.name
    ]


def with_conditions(schema: dict[str, Table]) -> list[tuple[Table, Column, Table]]:
    """Return those of `keyed_pairs` whose first table has a column for `condition`."""
    return [
        one for one in keyed_pairs(schema) if one[0].of_kind("numbers") or one[0].of_kind("words")
    ]


def over_two_keys(schema: dict[str, Table]) -> list[tuple[Table, Column, Table, Column, Table]]:
    """Return chains of three tables; after each but the last comes its key to the next."""
    return [
        (child, key, parent, upper, schema[upper.key_of])
        for child in schema.values()
        for key in child.of_kind("key_of")
        for parent in [schema[key.key_of]]
        for upper in parent.of_kind("key_of")
        if schema[upper.key_of].name_column.name
    ]


# First degree


def ranked(schema: dict[str, Table], db: Any, rng: random.Random, place: str = "") -> Draft:
    child, key, parent = rng.choice(keyed_pairs(schema))
    numbers = child.of_kind("numbers")
    what, order = f"the {place}most {child.rows}", "COUNT(*)"
    if numbers and rng.random() < 0.5:
        column = rng.choice(numbers)
        what = f"the {place}highest total {spoken_name(column)} of its {child.rows}"
        order = f"SUM(c.{column.name})"
    return (
        f"Which {singular(parent)} has {what}? Give its {spoken_name(parent.name_column)} alone.",
        f"SELECT p.{parent.name_column.name} FROM {joined(child, key, parent)}"
        f" GROUP BY p.id ORDER BY {order} DESC LIMIT 1",
    )


def grouped(schema: dict[str, Table], db: Any, rng: random.Random) -> Draft:
    child, key, parent = rng.choice(keyed_pairs(schema))
    number = rng.randint(2, 6)
    each = f"List the {spoken_name(parent.name_column)} of each {singular(parent)}"
    return f"{each} with more than {number} {child.rows}.", (
        f"SELECT p.{parent.name_column.name} FROM {joined(child, key, parent)}"
        f" GROUP BY p.id HAVING COUNT(*) > {number}"
    )


def counted_over_two(schema: dict[str, Table], db: Any, rng: random.Random) -> Draft:
    child, key, parent, upper, top = rng.choice(over_two_keys(schema))
    [name] = rng.choice(rows_of(db, f"SELECT {top.name_column.name} FROM {top.name}"))
    belongs = f"whose {singular(parent)} belongs to the {singular(top)} {name}"
    return f"How many {child.rows} are there {belongs}?", (
        f"SELECT COUNT(*) FROM {joined(child, key, parent)}"
        f" JOIN {top.name} t ON p.{upper.name} = t.id WHERE t.{top.name_column.name} = '{name}'"
    )


# Second degree


def above_their_average(schema: dict[str, Table], db: Any, rng: random.Random) -> Draft:
    candidates = [
        one for one in keyed_pairs(schema) if one[0].name_column.name and one[0].of_kind("numbers")
    ]
    child, key, parent = rng.choice(candidates)
    column = rng.choice(child.of_kind("numbers")).name
    spoken = column.replace("_", " ")
    every = f"List the {spoken_name(child.name_column)} of all {child.rows}"
    return f"{every} whose {spoken} is above the average {spoken} of their {singular(parent)}.", (
        f"SELECT c.{child.name_column.name} FROM {child.name} c WHERE c.{column} >"
        f" (SELECT AVG(d.{column}) FROM {child.name} d WHERE d.{key.name} = c.{key.name})"
    )


def without_any(schema: dict[str, Table], db: Any, rng: random.Random) -> Draft:
    child, key, parent = rng.choice(with_conditions(schema))
    words, where = condition(child, rng, "c.")
    each = f"List the {spoken_name(parent.name_column)} of each {singular(parent)}"
    return f"{each} that has none of the {child.rows} whose {words}.", (
        f"SELECT p.{parent.name_column.name} FROM {parent.name} p WHERE NOT EXISTS"
        f" (SELECT 1 FROM {child.name} c WHERE c.{key.name} = p.id AND {where})"
    )


def ranked_among(schema: dict[str, Table], db: Any, rng: random.Random) -> Draft:
    child, key, parent = rng.choice(with_conditions(schema))
    words, where = condition(child, rng, "c.")
    which = f"Which {singular(parent)} has the most {child.rows} whose {words}?"
    return f"{which} Give its {spoken_name(parent.name_column)} alone.", (
        f"SELECT p.{parent.name_column.name} FROM {joined(child, key, parent)} WHERE {where}"
        " GROUP BY p.id ORDER BY COUNT(*) DESC LIMIT 1"
    )


# Third degree


def each_with_its_count(schema: dict[str, Table], db: Any, rng: random.Random) -> Draft:
    child, key, parent = rng.choice(with_conditions(schema))
    words, where = condition(child, rng, "c.")
    each = f"For each {singular(parent)} give its {spoken_name(parent.name_column)} and the number"
    return f"{each} of its {child.rows} whose {words}, which may be 0.", (
        f"SELECT p.{parent.name_column.name}, COUNT(c.id) FROM {parent.name} p"
        f" LEFT JOIN {child.name} c ON c.{key.name} = p.id AND {where} GROUP BY p.id"
    )


def second_best(schema: dict[str, Table], db: Any, rng: random.Random) -> Draft:
    question, sql = ranked(schema, db, rng, "second ")
    return question, f"{sql} OFFSET 1"


def grouped_over_two(schema: dict[str, Table], db: Any, rng: random.Random) -> Draft:
    candidates = [way for way in over_two_keys(schema) if way[0].of_kind("numbers")]
    child, key, parent, upper, top = rng.choice(candidates)
    column = rng.choice(child.of_kind("numbers"))
    each = (
        f"For each {singular(top)} that has any, give its {spoken_name(top.name_column)} and the"
        " average"
    )
    return f"{each} {spoken_name(column)} of the {child.rows} of its {parent.rows}.", (
        f"SELECT t.{top.name_column.name}, AVG(c.{column.name}) FROM {joined(child, key, parent)}"
        f" JOIN {top.name} t ON p.{upper.name} = t.id GROUP BY t.id"
    )


def joined(child: Table, key: Column, parent: Table) -> str:
    return f"{child.name} c JOIN {parent.name} p ON c.{key.name} = p.id"


MAKERS = {
    1: (ranked, grouped, counted_over_two),
    2: (above_their_average, without_any, ranked_among),
    3: (each_with_its_count, second_best, grouped_over_two),
}


def is_sound(db: Any, sql: str) -> bool:
    """Return whether a query has one clear answer: not empty, not 0, and without a tie."""
    rows = rows_of(db, sql)
    if is_empty(rows) or rows == [(0,)] or len(rows) > MOST_ROWS:
        return False
    if " LIMIT 1" not in sql:
        return True
    body, order = sql.split(" ORDER BY ")
    by = f"SELECT {order.partition(' DESC')[0]} AS n {body[body.index('FROM') :]} ORDER BY n DESC"
    best = rows_of(db, by)[:3]
    return len(best) == 3 and len(set(best)) == 3


def questions(seed: int, split: str) -> Iterator[dict[str, object]]:
    """Yield different questions without end; degrees and schemas take turns."""
    rng = random.Random(f"{split}-{seed}")
    schemas = [name for name in SCHEMAS if (name in HELD_OUT) == (split == "held-out")]
    known = {name: database(name) for name in schemas}
    asked = set[str]()
    while True:
        for degree, makers in MAKERS.items():
            for schema in schemas:
                question, sql = rng.choice(makers)(tables(schema), known[schema], rng)
                while question in asked or not is_sound(known[schema], sql):
                    question, sql = rng.choice(makers)(tables(schema), known[schema], rng)
                asked.add(question)
                kind = f"degree-{degree}"
                yield {"schema": schema, "kind": kind, "question": question, "answer": sql}
