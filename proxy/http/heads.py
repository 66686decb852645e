"""Check heads of requests that parse and must still be refused, by RFC 9112 (pure)."""

import re
from functools import lru_cache
from typing import Final

from proxy.http.wire import Headers

VERSIONS: Final = ("1.1", "1.0")
# `uri-host [":" port]`, which may be empty (RFC 9110 §7.2, RFC 3986 §3.2.2).
_HOST: Final = re.compile(rb"(?:\[[0-9A-Za-z:._~%-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(?::[0-9]*)?\Z")


class Refused(ValueError):
    """Report a request that cannot be answered; the message says why."""

    def __init__(self, status: int, why: str) -> None:
        """Store the status to answer with, and the reason."""
        super().__init__(why)
        self.status = status
        self.why = why


def wrong_version(version: str) -> Refused:
    """Return the refusal of a version: 400 for HTTP/0.9, which has no heads at all, else 505."""
    status = 400 if version == "0.9" else 505
    return Refused(status, f"HTTP/{version} is not served here: send the request as HTTP/1.1")


def read_head(headers: Headers, *, modern: bool) -> bool:
    """Check a head, and return whether the client waits to be told to send its body.

    Args:
        headers: the request's headers.
        modern: the request is HTTP/1.1.

    Raises:
        Refused: the request does not have exactly one valid host (RFC 9112 §3.2), or its body has a
            coding that cannot be passed on as it is.
    """
    expects = False
    hosts = 0
    for name, value in headers:
        size = len(name)
        if size == 4:
            if name.lower() == b"host":
                hosts += 1
                _check_host(value)
        elif size == 6:
            if name.lower() == b"expect":
                expects = value.lower() == b"100-continue"
        elif size == 17 and name.lower() == b"transfer-encoding" and value.lower() != b"chunked":
            raise Refused(400, "a transfer coding that is not chunked cannot be passed on")
    if hosts != 1 and (modern or hosts):
        hosts_given = "no Host header" if not hosts else "more than one Host header"
        raise Refused(400, f"the request has {hosts_given}: RFC 9112 section 3.2 wants exactly one")
    return expects


@lru_cache(maxsize=64)
def _check_host(value: bytes) -> None:
    if _HOST.match(value) is None:
        raise Refused(400, "the Host header is not a host name with an optional port")
