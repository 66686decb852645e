"""Tell a web page's request from a program's, by headers that a page cannot choose (pure).

A browser sends what any site's page asks for to ports of its own machine and network too. It says
so in `Origin` and `Sec-Fetch-Site`; programs send neither. A site can also point its own name at
this machine (DNS rebinding): then its pages are of the same origin, but `Host` has that name.
"""

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

SETTING: Final = "PAWL_ALLOWED_HOSTS"
_NAMES: Final = frozenset({b"host", b"origin", b"sec-fetch-site", b"sec-fetch-dest"})
_SIZES: Final = frozenset(map(len, _NAMES))
_OURS: Final = (None, b"same-origin", b"none")
_REMEDY: Final = f"add it to {SETTING} if it is yours"


def why_foreign(
    method: str,
    headers: Iterable[tuple[bytes, bytes]],
    hosts: tuple[str, ...],
    *,
    loopback: bool = False,
) -> str | None:
    """Return why a request may be that of another site's page, or None if it is not.

    `hosts` are as `allowed_hosts` of the settings has them. With `loopback`, of IP addresses only
    loopback's may be the request's host.
    """
    said: dict[bytes, bytes] = {}
    for name, value in headers:
        # Comparing lengths is far cheaper than lowering every name.
        if len(name) in _SIZES and (lower := name.lower()) in _NAMES:
            said[lower] = value
    host = said.get(b"host")
    # HTTP/1.0 needs none, which no browser speaks.
    if host is not None and not _is_known(host, hosts, loopback):
        return f"Host is {_shown(host)}, a name that another site may have pointed here: {_REMEDY}"
    return None if len(said) < 2 else why_of_another_site(method, said, hosts)


def why_of_another_site(
    method: str, said: dict[bytes, bytes], hosts: tuple[str, ...]
) -> str | None:
    """Return why a page of another origin sent a request, or None if none did.

    That a person follows a link is none of a page's requests. `said` are the headers by lower-case
    name.
    """
    origin, site = said.get(b"origin"), said.get(b"sec-fetch-site")
    if origin is not None:
        page = origin.decode("latin-1").lower().partition("://")[2]
        host = said.get(b"host", b"").decode("latin-1").lower()
        if _is_listed(page, hosts) or (site is None and page == host):
            return None
        if site not in (b"same-origin", b"none"):
            return f"Origin is {_shown(origin)}, a page of another site: {_REMEDY}"
    is_link = method in ("GET", "HEAD") and said.get(b"sec-fetch-dest") == b"document"
    if site in _OURS or is_link:
        return None
    return (
        f"Sec-Fetch-Site is {_shown(site or b'')}, so a page of another site sent this: ask from a "
        f"program, or name the page's host in {SETTING} and let it send `Origin`"
    )


@lru_cache(maxsize=64)
def _is_known(host: bytes, hosts: tuple[str, ...], loopback: bool) -> bool:
    """Return whether no other site can have the host that a request names, with or without port."""
    name = host.decode("latin-1").lower()
    end = name.rfind("]") if name.startswith("[") else name.find(":")
    name = name.strip("[") if end < 0 else name[:end].strip("[")
    try:
        # No name that is looked up is an address, so that it cannot be pointed elsewhere.
        address = ip_address(name)
    except ValueError:
        return bool(name) and ("." not in name or _is_listed(name, hosts))
    return address.is_loopback or not loopback


def _is_listed(name: str, hosts: tuple[str, ...]) -> bool:
    """Return whether a host is listed, or is below one that is listed with a dot before it."""
    return name in hosts or any(name.endswith(one) for one in hosts if one.startswith("."))


def _shown(value: bytes) -> str:
    return repr(value.decode("latin-1")[:80])
