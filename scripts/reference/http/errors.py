"""List the errors of the data port: classes, statuses, codes, and where each can occur."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import proxy
from proxy import errors
from proxy.errors import ProxyError

from ..markdown import sentence

# How the docstring of an error's class begins, before what happened.
REPORTED: Final = "Report that "
CALL: Final = "call"
FORWARD: Final = "forward"
FEEDBACK: Final = "feedback"
EVERY: Final = (CALL, FORWARD, FEEDBACK)
ADMIN: Final = "admin"
# Where each error can be the answer to a request; an empty tuple: no client gets it.
WHERE: Final[dict[type[ProxyError], tuple[str, ...]]] = {
    errors.NotAllowed: (FORWARD,),
    errors.NoKey: (*EVERY, ADMIN),
    errors.OutOfScope: (*EVERY, ADMIN),
    errors.TooMany: (*EVERY, ADMIN),
    errors.KeysUnknown: (*EVERY, ADMIN),
    errors.Forbidden: (*EVERY, ADMIN),
    errors.BadRequest: EVERY,
    errors.KeyReused: (FEEDBACK,),
    errors.TooSlow: EVERY,
    errors.Unexpected: EVERY,
    errors.TooLarge: EVERY,
    errors.Overloaded: EVERY,
    errors.NoUpstream: (CALL, FORWARD),
    errors.NotServed: (CALL, FORWARD),
    errors.NotContinued: (CALL,),
    errors.NotKept: (CALL, FORWARD),
    errors.NotKnownNow: (CALL,),
    errors.NotLoaded: (CALL,),
    errors.UpstreamUnreachable: (CALL, FORWARD),
    errors.UpstreamBroke: (CALL, FORWARD),
    errors.ReplyTorn: (CALL, FORWARD),
    errors.Redirected: (CALL, FORWARD),
    errors.UnreadableCoding: (CALL,),
    errors.UpstreamSilent: (CALL, FORWARD),
    errors.NoModels: (),
    errors.ReplyTooLarge: (CALL,),
    errors.SpoolFull: (FEEDBACK,),
    errors.SpoolInUse: (),
    errors.DoesNotStart: (),
    errors.BadUpstreams: (),
    errors.BadRedaction: (),
    errors.ProgramFails: (),
}
# Codes of errors whose class is chosen at run time.
CHOSEN_CODES: Final = {
    "TooMany": {"rate_limit_exceeded"},
    "UpstreamBroke": {"upstream_broke"},
    "UpstreamSilent": {"upstream_silent"},
}
# What is refused before it is a request; the connection is closed after each.
NOT_READ: Final = {
    400: "The bytes are not an HTTP/1.1 request, or its head is not valid.",
    408: "The head did not come within `PAWL_HEAD_S`.",
    431: "Head or trailers are larger than 256 KiB.",
    500: "The proxy failed to read or to answer the request; its log says how.",
    505: "The request is of another HTTP version than 1.0 or 1.1.",
}


class ErrorClass(NamedTuple):
    """Describe one class of `proxy.errors`, as a client sees it."""

    name: str
    status: int
    fault: str
    kind: str
    meaning: str
    codes: tuple[str, ...]
    where: tuple[str, ...]
    retry_after_s: int | None


def error_classes() -> list[ErrorClass]:
    """Return the errors that a client can get, by status."""
    codes = codes_by_class()
    described = [_described(one, where, codes) for one, where in WHERE.items() if where]
    return sorted(described, key=lambda one: (one.status, one.name))


def subclasses(root: type[ProxyError] = ProxyError) -> Iterator[type[ProxyError]]:
    """Yield all classes of `proxy.errors` below the root."""
    for one in root.__subclasses__():
        if one.__module__ == errors.__name__:
            yield one
            yield from subclasses(one)


def codes_by_class() -> dict[str, set[str]]:
    """Return the values of `code` that the proxy's sources give each class of error."""
    by_class: dict[str, set[str]] = {}
    for path in sorted(Path(next(iter(proxy.__path__))).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                by_class.setdefault(node.func.id, set()).update(_codes(node))
    for name, codes in CHOSEN_CODES.items():
        by_class.setdefault(name, set()).update(codes)
    return by_class


def _codes(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        if keyword.arg == "code":
            constants = (one for one in ast.walk(keyword.value) if isinstance(one, ast.Constant))
            yield from (one.value for one in constants if isinstance(one.value, str))


def _described(
    error: type[ProxyError], where: tuple[str, ...], codes: dict[str, set[str]]
) -> ErrorClass:
    return ErrorClass(
        name=error.__name__,
        status=error.status,
        fault=error.fault,
        kind=error.kind,
        meaning=sentence((error.__doc__ or "").strip().removeprefix(REPORTED)),
        codes=tuple(sorted(codes.get(error.__name__, set()))),
        where=where,
        retry_after_s=error.retry_after_s,
    )
