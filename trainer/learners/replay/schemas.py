"""Find what vLLM does not leave to xgrammar (pure).

Its backend "auto" gives such JSON schemas to another library, whose masks are others. The rules
are those of `has_xgrammar_unsupported_json_features` (`vllm/v1/structured_output/
backend_xgrammar.py`).
"""

from collections.abc import Iterator
from typing import Any, Final

Schema = dict[str, Any]

FORMATS: Final = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
OF_ARRAYS: Final = ("uniqueItems", "contains", "minContains", "maxContains")


def is_for_another(schema: Any) -> bool:
    """Return whether a part of a JSON schema makes vLLM use another library."""
    return any(map(_is_odd, _objects(schema)))


def _objects(schema: Any) -> Iterator[Schema]:
    """Yield all objects in a schema; lists within lists are not looked into."""
    waiting = [schema] if isinstance(schema, dict) else []
    while waiting:
        one = waiting.pop()
        yield one
        for value in one.values():
            parts = value if isinstance(value, list) else [value]
            waiting += [part for part in parts if isinstance(part, dict)]


def _is_odd(one: Schema) -> bool:
    types, all_of = _types(one), one.get("allOf")
    return (
        (bool(types & {"integer", "number"}) and "multipleOf" in one)
        or ("array" in types and any(key in one for key in OF_ARRAYS))
        or ("string" in types and _is_odd_text(one))
        or ("object" in types and _has_odd_names(one))
        or (isinstance(all_of, list) and len(all_of) >= 2)
    )


def _types(one: Schema) -> set[str]:
    types = one.get("type")
    return {
        part for part in (types if isinstance(types, list) else [types]) if isinstance(part, str)
    }


def _is_odd_text(one: Schema) -> bool:
    return ("format" in one and not _is_known_format(one["format"])) or _is_pattern_of_a_length(one)


def _is_known_format(value: Any) -> bool:
    return isinstance(value, str) and value in FORMATS


def _is_pattern_of_a_length(one: Schema) -> bool:
    return ("pattern" in one or "format" in one) and ("minLength" in one or "maxLength" in one)


def _has_odd_names(one: Schema) -> bool:
    """Return whether an object's names are limited in two ways at once."""
    patterns = one.get("patternProperties")
    two_patterns = isinstance(patterns, dict) and ("properties" in one or len(patterns) > 1)
    if two_patterns or "propertyNames" not in one:
        return two_patterns
    names = one["propertyNames"]
    return (
        (isinstance(names, dict) and _is_pattern_of_a_length(names))
        or "patternProperties" in one
        or "properties" in one
        or one.get("unevaluatedProperties", True) is not True
    )
