"""Read off a call's record the fields that are columns of `transitions` (pure).

`store.records.Kept` marks them. The table, the rows that are written and the rows that are read
back all follow from it (docs/howto/add-a-field-of-a-call.md).
"""

from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from store.records import Kept, Record


class KeptField(NamedTuple):
    """Describe a field that is its own column: its type without None, and if it may be null."""

    name: str
    type: Any
    null: bool
    kept: Kept


def kept_fields(record: type[Record]) -> tuple[KeptField, ...]:
    """Return the fields of a record type that are columns, in the order of their definition."""
    hints = get_type_hints(record, include_extras=True)
    marked = ((name, _mark(hints[name])) for name in record.__struct_fields__)
    return tuple(
        KeptField(name, *_plain(get_args(hints[name])[0]), mark)
        for name, mark in marked
        if mark is not None
    )


def _mark(hint: Any) -> Kept | None:
    marks = getattr(hint, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, Kept)), None)


def _plain(hint: Any) -> tuple[Any, bool]:
    """Return a type without None, and whether it had it; names from a list are text."""
    choices = [one for one in get_args(hint) if one is not NoneType]
    null = NoneType in get_args(hint)
    kind = choices[0] if null else hint
    return (str if get_origin(kind) is Literal else kind), null
