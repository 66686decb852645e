"""Read W3C trace context and baggage, where a call names the work it belongs to (pure).

https://www.w3.org/TR/baggage/ and https://www.w3.org/TR/trace-context/. A malformed header is
treated as absent: the specifications ask receivers not to fail because of one.
"""

import re
from typing import Final
from urllib.parse import unquote

# Platforms must pass on baggage of up to this many bytes (W3C Baggage §3.3.2).
MAX_BAGGAGE: Final = 8192
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?",
    re.ASCII,
)


def parse_baggage(header: str) -> dict[str, str]:
    """Return the members of a `baggage` header, values percent-decoded, properties left out.

    If a key occurs twice, its first value counts. A header longer than `MAX_BAGGAGE` gives no
    members.
    """
    members: dict[str, str] = {}
    if len(header) > MAX_BAGGAGE:
        return members
    for member in header.split(","):
        key, equals, value = member.partition(";")[0].partition("=")
        if equals and key.strip():
            members.setdefault(key.strip(), unquote(value.strip()))
    return members


def trace_id(traceparent: str) -> str | None:
    """Return the trace id of a `traceparent` header, or None if the header is malformed."""
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    return match["trace"] if match else None
