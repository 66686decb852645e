"""Tell a web page's request from a program's, by headers that a page cannot choose (pure).

A browser lets a page of any site send requests to ports of the browser's own machine. `Origin` and
`Sec-Fetch-Site`, which programs do not send, reveal them. A site can also point its own name at
this machine (DNS rebinding): then `Host` has that name.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

_NAMES: Final = frozenset({b"host", b"origin", b"sec-fetch-site", b"sec-fetch-dest"})
_SIZES: Final = frozenset(map(len, _NAMES))
_HOST: Final = re.compile(r"\[?(.*?)\]?(?::\d*)?")


def why_foreign(
    method: str,
    headers: Iterable[tuple[bytes, bytes]],
    hosts: tuple[str, ...] | None,
    *,
    loopback: bool = False,
) -> str | None:
    """Return why a request may come from another site's page, or None if it does not.

    A link that a person follows is allowed. `hosts` are those of `PAWL_ALLOWED_HOSTS`; None: any
    `Host` is allowed, and only pages of that host. With `loopback`, the only IP addresses allowed
    as `Host` are loopback's and 0.0.0.0.
    """
    values: dict[bytes, str] = {}
    for name, value in headers:
        # Comparing lengths is far cheaper than lowering every name.
        if len(name) in _SIZES and (lower := name.lower()) in _NAMES:
            values[lower] = value.decode("latin-1").lower()
    host, origin, site = values.get(b"host"), values.get(b"origin"), values.get(b"sec-fetch-site")
    # HTTP/1.0 needs no host, and no browser speaks it.
    if hosts is not None and host is not None and not _is_own_host(host, hosts, loopback):
        return _foreign_page_message("Host", host)
    if origin is None and site is None:
        return None
    page = (origin or "").rpartition("://")[2]
    is_link = method in ("GET", "HEAD") and values.get(b"sec-fetch-dest") == "document"
    is_same_site = site in ("same-origin", "none") or (site is None and page == host)
    is_listed = any(name and name in (hosts or ()) for name in (page, origin))
    if is_link or is_same_site or is_listed:
        return None
    return (
        _foreign_page_message("Sec-Fetch-Site", site or "")
        if origin is None
        else _foreign_page_message("Origin", origin)
    )


def _foreign_page_message(header: str, value: str) -> str:
    return (
        f"{header} is {value[:80]!r}, so another site's page may have sent this: if it is yours, "
        "add its host to PAWL_ALLOWED_HOSTS"
    )


@lru_cache(maxsize=64)
def _is_own_host(host: str, hosts: tuple[str, ...], loopback: bool) -> bool:
    """Return whether `host`, with or without a port, is one that no other site can have.

    Such hosts are IP addresses (with `loopback` only this machine's own), names without a dot, and
    the names in `hosts`.
    """
    named = _HOST.fullmatch(host)
    name = named[1] if named else ""
    try:
        # An address is not resolved, so DNS cannot point it elsewhere. 0.0.0.0 is this machine.
        address = ip_address(name)
        return address.is_loopback or address.is_unspecified or not loopback
    except ValueError:
        name = name.rstrip(".")
        suffixes = tuple(allowed for allowed in hosts if allowed.startswith("."))
        return name != "" and ("." not in name or name in hosts or name.endswith(suffixes))
