"""Read the header `x-pawl-tool-status`: how the tools ended that ran since the last call (pure).

It is an RFC 9651 list of tokens with parameters: `ok;id="call_1", error;id="call_2";detail="exit
2"`.
"""

from decimal import Decimal
from typing import Any, Final

import http_sf
import msgspec

from store.ids import new_id
from store.records import TOOL_STATUSES, ToolEvent

HEADER: Final = "x-pawl-tool-status"
MAX_TEXT: Final = 1024
PARAMETERS: Final = ("id", "name", "detail", "ms")


class ToolStatusError(ValueError):
    """Report that the header breaks RFC 9651 or docs/howto/tool-status.md; the message says how."""


def parse_tool_status(value: str) -> tuple[ToolEvent, ...]:
    """Return the tool events that the header states.

    Raises:
        ToolStatusError: some part of the header is invalid; none of it is used.
    """
    try:
        members = http_sf.parse(value.encode(), tltype="list")
    except (http_sf.StructuredFieldError, UnicodeEncodeError) as error:
        raise ToolStatusError(f"{HEADER} is not an RFC 9651 list: {error}") from error
    return tuple(_event(member, parameters) for member, parameters in members)


def _event(member: Any, parameters: dict[str, Any]) -> ToolEvent:
    status = str(member) if isinstance(member, http_sf.Token) else None
    if status not in TOOL_STATUSES:
        known = ", ".join(TOOL_STATUSES)
        raise ToolStatusError(f"{HEADER}: {member!s} is not a tool status; use one of {known}")
    unknown = next((name for name in parameters if name not in PARAMETERS), None)
    if unknown is not None:
        allowed = ", ".join(PARAMETERS)
        raise ToolStatusError(f"{HEADER}: unknown parameter {unknown!r}; allowed are {allowed}")
    if "id" not in parameters:
        raise ToolStatusError(f'{HEADER}: {status} has no id; write {status};id="call_…"')
    return msgspec.convert(
        {
            "id": new_id(),
            "tool_id": _text(parameters, "id"),
            "name": _text(parameters, "name"),
            "status": status,
            "detail": _text(parameters, "detail"),
            "ms": _number(parameters, "ms"),
        },
        ToolEvent,
    )


def _text(parameters: dict[str, Any], name: str) -> str | None:
    value = parameters.get(name)
    if value is None:
        return None
    if isinstance(value, str) and not isinstance(value, http_sf.Token):
        if len(value) > MAX_TEXT or "\x00" in value:
            raise ToolStatusError(
                f"{HEADER}: {name} must be at most {MAX_TEXT} characters without U+0000"
            )
        return value
    raise ToolStatusError(f'{HEADER}: {name} must be a string in quotes, such as {name}="x"')


def _number(parameters: dict[str, Any], name: str) -> float | None:
    value = parameters.get(name)
    if value is None:
        return None
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and value >= 0:
        return float(value)
    raise ToolStatusError(f"{HEADER}: {name} must be a number of milliseconds, 0 or more")
