"""Score a query: 1 if it finds the same rows as the right query, in any order, else 0."""

from __future__ import annotations

import sqlite3
from typing import Any

from company import is_empty, rows_of
from databases import database


def verdict(run: dict[str, Any]) -> dict[str, float]:
    """Return the reward of one run: `run` has the task, with the right query, and the output."""
    db = database(run["task"].get("schema"))
    right = rows_of(db, run["task"]["answer"])
    try:
        given = rows_of(db, run["output"])
    except (sqlite3.Error, sqlite3.Warning, UnicodeEncodeError):
        return {"reward": 0.0, "well_formed": 0.0}
    same = sorted(map(repr, given)) == sorted(map(repr, right))
    return {"reward": float(same and not is_empty(right)), "well_formed": 1.0}
