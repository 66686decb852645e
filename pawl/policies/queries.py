"""Read what `pawl policies rebuild --without` is given: which episodes are left out (pure).

A query is an episode's key or id, or conditions that an episode must meet, `FIELD=VALUE`, separated
by commas. A comma in a value is one unless a field follows it.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from pawl.commands.common import with_zone
from store.errors import StoreError
from store.rebuilding.choosing import Query

TIMES: Final = ("since", "before", "scored_since", "scored_before")
FIELDS: Final = tuple(name.replace("_", "-") for name in Query.__struct_fields__)
_FIELD: Final = "|".join(FIELDS)
_BEGINS: Final = re.compile(rf"(?:{_FIELD})=")
_NEXT: Final = re.compile(rf",(?=(?:{_FIELD})=)")


class BadQuery(StoreError):
    """Report a query that cannot be read; the message names the field and the remedy."""


def read_queries(texts: Sequence[str]) -> tuple[Query, ...]:
    """Return the queries that these texts write.

    Raises:
        BadQuery: one of them cannot be read.
    """
    return tuple(map(read_query, texts))


def read_query(text: str) -> Query:
    """Return the query that a text writes; one that begins with no field is an episode's name.

    Raises:
        BadQuery: a value is missing or is no time, a field comes twice, or an episode's name has
            further conditions.
    """
    if not _BEGINS.match(text):
        return Query(episode=_said(text, "episode", text))
    values: dict[str, str] = {}
    for condition in _NEXT.split(text):
        field, _, value = condition.partition("=")
        if field in values:
            raise BadQuery(f"--without {text!r}: {field}: it comes twice: give it once")
        values[field] = _said(text, field, value)
    if "episode" in values and len(values) > 1:
        raise BadQuery(
            f"--without {text!r}: episode: a name selects one episode: leave the other conditions"
            " away, or give a --without of their own"
        )
    return Query(**_typed(text, values))


def _said(text: str, field: str, value: str) -> str:
    if not value:
        raise BadQuery(f"--without {text!r}: {field}: the value is missing: write {field}=VALUE")
    return value


def _typed(text: str, values: Mapping[str, str]) -> dict[str, Any]:
    named = {field.replace("-", "_"): value for field, value in values.items()}
    return {
        name: _time(text, name, value) if name in TIMES else value for name, value in named.items()
    }


def _time(text: str, field: str, value: str) -> datetime | None:
    try:
        return with_zone(datetime.fromisoformat(value))
    except ValueError as error:
        raise BadQuery(
            f"--without {text!r}: {field.replace('_', '-')}: {value!r} is no time: write it as"
            " 2026-11-22 or 2026-11-22T14:30, with a zone (+01:00) or in this machine's"
        ) from error
