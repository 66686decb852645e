"""W3C trace context and baggage: what a call says of the work it is part of (pure).

https://www.w3.org/TR/baggage/ and https://www.w3.org/TR/trace-context/. What is malformed
is as if it were absent: the specifications ask receivers not to fail for it.
"""

import re
from typing import Final
from urllib.parse import unquote

# The size up to which the specification has every platform pass baggage on (§3.3.2).
MAX_BAGGAGE: Final = 8192
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?",
    re.ASCII,
)


def parse_baggage(header: str) -> dict[str, str]:
    """The members of a `baggage` header, values percent-decoded, properties left out.

    Of a key that is told twice, the first counts. A header that is longer than anyone has
    to pass on says nothing.
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
    """The trace that a `traceparent` header names, None if it names none."""
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    return match["trace"] if match else None
