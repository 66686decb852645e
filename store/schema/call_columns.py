"""Derive columns from the definition of a call's record (`store.records.CallRecord`)."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    DateTime,
    Double,
    Integer,
    LargeBinary,
    Text,
    Uuid,
)

from store.records import Record
from store.values.call_fields import KeptField, kept_fields

TYPES: Final[Mapping[Any, Any]] = {
    UUID: Uuid,
    str: Text,
    int: Integer,
    float: Double,
    bool: Boolean,
    bytes: LargeBinary,
    datetime: DateTime(timezone=True),
}


def call_columns(record: type[Record]) -> list[Column[Any]]:
    """Return a column for each field of a call's record that is marked as one.

    Raises:
        TypeError: a field has a type that no column is known for.
    """
    return [_column(record, field) for field in kept_fields(record)]


def _column(record: type[Record], field: KeptField) -> Column[Any]:
    if not field.kept.json and field.type not in TYPES:
        raise TypeError(
            f"{record.__name__}.{field.name} is a {field.type}, for which no type of column is "
            f"known; mark it as json, or add the type to {__name__}.TYPES"
        )
    return Column(
        field.name,
        JSON(none_as_null=field.null) if field.kept.json else TYPES[field.type],
        primary_key=field.name == "id",
        nullable=field.null,
        doc=field.kept.about or None,
    )
