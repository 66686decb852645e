"""Make questions about the company's database, each with the query that answers it.

There are five kinds in equal numbers; the same seed makes the same questions. A hash of its query
decides a question's split, so that training and held-out questions have no query in common. Worked
examples show their queries, so none of them is a held-out question.

With SQL_DATABASES=many the questions are about six databases of ten tables (`questions.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
from itertools import islice

from company import CITIES, DEPARTMENTS, EMPLOYEES, company, is_empty, rows_of
from questions import questions
from shown import POOL

SPLITS = ("train", "held-out")
# One query in this many is held out.
HELD_OUT_SHARE = 6
SIGNS = {"above": ">", "below": "<"}
KINDS = ("count", "filter", "extreme", "value", "join")
SHOWN = {sql for _, sql, _ in POOL}


def number_condition(rng: random.Random) -> tuple[str, str, str, str, str]:
    """Return plural, table, column of names, and a condition on a number in words and in SQL."""
    word = rng.choice(list(SIGNS))
    if rng.random() < 0.4:
        number = rng.randint(40, 360)
        return (
            "projects",
            "project",
            "title",
            f"hours {word} {number}",
            f"hours {SIGNS[word]} {number}",
        )
    column, number = rng.choice(
        (("age", rng.randint(25, 60)), ("salary", rng.randint(30, 90) * 100))
    )
    in_words, in_sql = f"{column} {word} {number}", f"{column} {SIGNS[word]} {number}"
    return "employees", "employee", "name", in_words, in_sql


def make_question(rng: random.Random, kind: str) -> tuple[str, str]:
    """Return a question of one kind, and the query that answers it."""
    plural, table, name, in_words, in_sql = number_condition(rng)
    if kind == "count":
        return f"How many {plural} have {in_words}?", f"SELECT COUNT(*) FROM {table} WHERE {in_sql}"
    if kind == "filter":
        return (
            f"List the {name} of {plural} with {in_words}.",
            f"SELECT {name} FROM {table} WHERE {in_sql}",
        )
    if kind == "extreme":
        how, column = rng.choice(("max", "min", "avg")), rng.choice(("age", "salary"))
        where = rng.choice(DEPARTMENTS)
        return (
            f"What is the {how} {column} of employees with department {where}?",
            f"SELECT {how.upper()}({column}) FROM employee WHERE department = '{where}'",
        )
    if kind == "value":
        column, who = rng.choice(("age", "salary", "department")), rng.choice(EMPLOYEES)
        return (
            f"What is the {column} of the employee with name {who}?",
            f"SELECT {column} FROM employee WHERE name = '{who}'",
        )
    table, columns = rng.choice(
        (("employee", ("name", "age", "salary")), ("project", ("title", "hours")))
    )
    column, city = rng.choice(columns), rng.choice(CITIES)
    return (
        f"List the {column} of {table}s whose department has city {city}.",
        f"SELECT {column} FROM {table} WHERE department IN "
        f"(SELECT name FROM department WHERE city = '{city}')",
    )


def split_of(sql: str) -> str:
    """Return the split of a query."""
    digest = hashlib.sha256(sql.encode()).digest()
    return "held-out" if digest[0] % HELD_OUT_SHARE == 0 else "train"


def may_be_asked(sql: str, split: str) -> bool:
    return split_of(sql) == split and not (split == "held-out" and sql in SHOWN)


def tasks(count: int, seed: int, split: str) -> list[dict[str, object]]:
    """Return `count` questions of one split that have an answer in the database."""
    rng, db = random.Random(f"{split}-{seed}"), company()
    made: list[dict[str, object]] = []
    while len(made) < count:
        for kind in rng.sample(KINDS, len(KINDS)):
            question, sql = make_question(rng, kind)
            while not may_be_asked(sql, split) or is_empty(rows_of(db, sql)):
                question, sql = make_question(rng, kind)
            name = f"{split}-{seed}-{len(made)}"
            made.append({"id": name, "kind": kind, "question": question, "answer": sql})
    return made[:count]


def many_databases(count: int, seed: int, split: str) -> list[dict[str, object]]:
    """Return `count` questions about the databases of one split."""
    return [
        {"id": f"{one['kind']}/{split}-{seed}-{number}", **one}
        for number, one in enumerate(islice(questions(seed, split), count))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=SPLITS, default="train")
    options = parser.parse_args()
    makers = {"": tasks, "many": many_databases}
    chosen = os.environ.get("SQL_DATABASES", "")
    if chosen not in makers:
        parser.error(f"SQL_DATABASES: {chosen!r} is neither unset nor `many`")
    make = makers[chosen]
    for task in make(options.count, options.seed, options.split):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
