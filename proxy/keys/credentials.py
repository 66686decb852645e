"""Find a client's credentials among a request's headers, and take them out (pure)."""

from typing import Final

import msgspec

from proxy.http.wire import Headers
from proxy.upstreams.keys import CREDENTIALS
from store.keys.secrets import MARK

# Headers by which a reverse proxy says that the request is another's (RFC 7239, RFC 9110 §7.6.3,
# and what came before).
RELAYED: Final = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"})
_SIZES: Final = frozenset(map(len, CREDENTIALS | RELAYED))


class Shown(msgspec.Struct, frozen=True, gc=False):
    """Hold what headers say of who calls: a credential, and whether a reverse proxy relayed it.

    `headers` are those that hold a client's credentials.
    """

    credential: bytes | None = None
    relayed: bool = False
    headers: tuple[tuple[bytes, bytes], ...] = ()


NOTHING: Final = Shown()


def shown_in(headers: Headers) -> Shown:
    """Return the credentials in a request's headers, and whether it came through a proxy.

    Of several credentials the first that looks like a key counts, else the first.
    """
    found: list[tuple[bytes, bytes]] | None = None
    relayed = False
    for pair in headers:
        # Comparing lengths is far cheaper than lowering every name.
        if len(pair[0]) in _SIZES:
            lower = pair[0].lower()
            if lower in CREDENTIALS:
                if found is None:
                    found = [pair]
                else:
                    found.append(pair)
            elif lower in RELAYED:
                relayed = True
    if found is None:
        return Shown(relayed=True) if relayed else NOTHING
    credential = _bare(found[0][1])
    if len(found) > 1:
        credential = next((one for one in map(_key, found) if one), credential)
    return Shown(credential, relayed, tuple(found))


def without_credentials(headers: Headers, shown: Shown) -> Headers:
    """Return the headers without those that hold a client's credentials."""
    kept = headers.copy()
    for pair in shown.headers:
        kept.remove(pair)
    return kept


def _key(pair: tuple[bytes, bytes]) -> bytes:
    """Return the value of a header if it looks like a key, else nothing."""
    value = _bare(pair[1])
    return value if value.startswith(MARK) else b""


def _bare(value: bytes) -> bytes:
    """Return a credential without the word `Bearer` (RFC 6750 §2.1), which has no fixed case."""
    return value[7:].strip() if value[:7].lower() == b"bearer " else value.strip()
