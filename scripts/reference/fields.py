"""Describe pydantic fields: type, limits, default and meaning."""

import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import HttpUrl, SecretStr
from pydantic.fields import FieldInfo

from trainer.recipes.options import NameFrom

NAMES: Final[dict[object, str]] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
    HttpUrl: "URL",
    SecretStr: "text, secret",
}


def type_of(field: FieldInfo) -> str:
    """Return the type of a field with its limits, as a reader would write it."""
    return _with_limits(_type(field.annotation), field.metadata)


def _alternatives(names: Iterable[object]) -> str:
    return ", ".join(f"`{one}`" for one in names)


def default_of(field: FieldInfo) -> str:
    """Return the default as written in a file or a variable; `unset` if it is None."""
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "unset"
    return f"`{as_toml(value)}`" if str(value) else "empty"


def meaning_of(field: FieldInfo) -> str:
    """Return the field's description.

    Raises:
        ValueError: it has none.
    """
    if not field.description:
        raise ValueError(f"a field without a description: {field!r}")
    return field.description


def as_toml(value: object) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if 0 < abs(value) < 1e-3 else repr(value)
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        inner = ", ".join(f"{key} = {as_toml(one)}" for key, one in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    return str(value)


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _with_limits(_type(arguments[0]), arguments[1:])
    if origin is Literal:
        return _alternatives(arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(one) for one in arguments if one is not types.NoneType)
    if origin is dict:
        return f"table of {_type(arguments[1])}"
    if origin in (list, tuple):
        return f"list of {_type(arguments[0])}"
    return NAMES.get(annotation, "text")


def _with_limits(name: str, metadata: Iterable[object]) -> str:
    metadata = list(metadata)
    for one in metadata:
        if isinstance(one, NameFrom):
            return _alternatives(one.names())
    limits = ", ".join(limit for one in metadata for limit in _limits(one))
    return f"{name}, {limits}" if limits else name


def _limits(constraint: object) -> list[str]:
    """Return the limits in one piece of a field's metadata; those of a `Field` are inside it."""
    if isinstance(constraint, FieldInfo):
        return [limit for one in constraint.metadata for limit in _limits(one)]
    for kind, sign in ((Ge, "≥"), (Gt, ">"), (Le, "≤"), (Lt, "<")):
        if isinstance(constraint, kind):
            return [f"{sign} {getattr(constraint, kind.__name__.lower())}"]
    finite = getattr(constraint, "allow_inf_nan", None) is False
    return ["finite"] if finite else []
