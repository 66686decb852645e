"""The small company's database: employees, departments and projects."""

from __future__ import annotations

import random
import sqlite3
from typing import Any

SCHEMA = """
CREATE TABLE department (name TEXT, city TEXT, budget INTEGER);
CREATE TABLE employee (name TEXT, department TEXT, age INTEGER, salary INTEGER);
CREATE TABLE project (title TEXT, department TEXT, hours INTEGER);
"""
DEPARTMENTS = ("Sales", "Legal", "Design", "Support", "Research", "Finance", "Logistics", "Press")
CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Delhi", "Paris", "Quito", "Tokyo")
EMPLOYEES = (
    "Ada",
    "Alan",
    "Amy",
    "Ben",
    "Bob",
    "Carl",
    "Clara",
    "Dan",
    "Dora",
    "Eli",
    "Emma",
    "Eric",
    "Eva",
    "Finn",
    "Fred",
    "Gina",
    "Greta",
    "Hans",
    "Hugo",
    "Ida",
    "Igor",
    "Ines",
    "Ivan",
    "Jack",
    "Jane",
    "John",
    "Judy",
    "Karl",
    "Kate",
    "Kim",
    "Lara",
    "Leo",
    "Lily",
    "Liam",
    "Mara",
    "Mark",
    "Mia",
    "Nina",
    "Noah",
    "Olga",
)
PROJECTS = (
    "Apollo",
    "Beacon",
    "Comet",
    "Delta",
    "Ember",
    "Falcon",
    "Garnet",
    "Harbor",
    "Iris",
    "Jupiter",
    "Kestrel",
    "Lotus",
    "Meteor",
    "Nova",
    "Orion",
    "Pearl",
)
# Steps of SQLite's virtual machine between two checks: the second check stops a query.
MOST_STEPS = 200_000
ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)


def company() -> sqlite3.Connection:
    """Return the database, in memory and read-only."""
    rng = random.Random("company")
    db = sqlite3.connect(":memory:")
    db.executescript(SCHEMA)
    for name, city in zip(DEPARTMENTS, CITIES, strict=True):
        db.execute(
            "INSERT INTO department VALUES (?, ?, ?)", (name, city, rng.randint(20, 99) * 10)
        )
    for name in EMPLOYEES:
        row = (name, rng.choice(DEPARTMENTS), rng.randint(21, 64), rng.randint(20, 99) * 100)
        db.execute("INSERT INTO employee VALUES (?, ?, ?, ?)", row)
    for title in PROJECTS:
        row = (title, rng.choice(DEPARTMENTS), rng.randint(10, 400))
        db.execute("INSERT INTO project VALUES (?, ?, ?)", row)
    db.commit()
    make_read_only(db)
    return db


def make_read_only(db: sqlite3.Connection) -> None:
    """Make a database read-only from now on."""
    db.set_authorizer(
        lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY
    )


def rows_of(db: sqlite3.Connection, sql: str) -> list[tuple[Any, ...]]:
    """Return a query's rows.

    Raises:
        sqlite3.Error: it cannot be run, or takes too long.
    """
    steps = iter((0,))
    db.set_progress_handler(lambda: next(steps, 1), MOST_STEPS)
    return db.execute(sql).fetchmany(100)


def is_empty(rows: list[tuple[Any, ...]]) -> bool:
    """Return whether a query found nothing: no row, or nothing but NULL."""
    return all(value is None for row in rows for value in row)
