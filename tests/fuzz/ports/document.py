"""The OpenAPI document with the forwarded routes as paths, which schemathesis reads alone."""

from collections.abc import Iterator
from itertools import count
from typing import Any, Final

from tests.fuzz.ports.allowed import DOCUMENT, REPEATED

JSON: Final = "application/json"
# Of the parts that may follow a path, so many are tried.
DEEPEST: Final = 2
PASSED_ON: Final = {"default": {"description": "The upstream's reply.", "content": {"*/*": {}}}}


def whole_document() -> dict[str, Any]:
    """Every route of both ports, with the scope that it needs."""
    paths: dict[str, Any] = {path: dict(item) for path, item in DOCUMENT["paths"].items()}
    for route in DOCUMENT["x-pawl-forwarded"]["routes"]:
        for path in (full for short in route["paths"] for full in _repeated(short)):
            named, names = _named(path)
            item = paths.setdefault(named, {})
            for method in route["methods"]:
                item[method.lower()] = _operation(method, names, route["security"])
    return DOCUMENT | {"paths": paths}


def _repeated(path: str) -> Iterator[str]:
    if REPEATED.search(path) is None:
        yield path
        return
    yield from (REPEATED.sub("/{id}" * times, path) for times in range(DEEPEST + 1))


def _named(path: str) -> tuple[str, list[str]]:
    """The path with a name of its own for each parameter, and the names."""
    number, names = count(1), []
    for part in ("{id}", "{model}"):
        while part in path:
            names.append(f"p{next(number)}")
            path = path.replace(part, f"{{{names[-1]}}}", 1)
    return path, names


def _operation(method: str, names: list[str], security: Any) -> dict[str, Any]:
    places = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    anything = {"requestBody": {"content": {JSON: {"schema": {"type": "object"}}}}}
    return {
        "parameters": places,
        "security": security,
        "responses": PASSED_ON,
        **(anything if method == "POST" else {}),
    }
