"""Let a request in, or say why not: the one place where keys are found and checked.

Every check is in memory. A wrong key, a revoked one and a right one cost the same: a hash, a
look-up by the id that is no secret, and a comparison in constant time.
"""

from hmac import compare_digest
from time import monotonic
from typing import Final

import msgspec

from proxy.errors import Forbidden, KeysUnknown, NoKey, OutOfScope, TooMany
from proxy.http.exchange import Exchange
from proxy.http.wire import Headers
from proxy.keys.limits import Usage
from proxy.upstreams.keys import CREDENTIALS
from store.keys.grants import Access, Grant, Scope
from store.keys.keys import KeyRing
from store.keys.secrets import ID_BYTES, MARK, hash_of

# What is asked of a model server may take tokens; feedback takes none.
INFER: Final[Scope] = "infer"
_ID: Final = slice(len(MARK), len(MARK) + 2 * ID_BYTES)
# What an id that is not known is compared with: no key has this hash.
_NOBODY: Final = Grant(id="", hash=bytes(32), scopes=())
# An id that is always known, as nobody's, and one that never is; no key has either.
_ALWAYS: Final = bytes(2 * ID_BYTES)
_NEVER: Final = b"\1" * (2 * ID_BYTES)
_SEND: Final = "send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"

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


class Gate:
    """Know the keys, and check what requests show."""

    def __init__(self, access: Access, workers: int = 1) -> None:
        """Begin without knowing the keys: until `take`, nobody is let in.

        Each of `workers` holds keys to its share of their limits.
        """
        self._access = access
        self._workers = workers
        self._usages: dict[str, Usage] = {}
        self._known: KeyRing | None = None
        self._grants: dict[bytes, Grant] = {bytes(bytearray(_ALWAYS)): _NOBODY}
        # Keys are asked for, or would be if they were known.
        self._asks = True

    def take(self, ring: KeyRing | None) -> None:
        """Replace the keys. None: they are not known; then those known so far go on to count.

        So they do if no key was ever made: somebody removed the file that told of those.
        """
        if (ring is None or not ring.made) and self._known is not None and self._known.made:
            return
        self._known = ring
        self._asks = ring is None or ring.made or self._access == "keys"
        grants = () if ring is None else ring.grants
        self._grants = {grant.id.encode(): grant for grant in grants}
        # An equal one, not the same: bytes are compared as they are for any key's id.
        self._grants[bytes(bytearray(_ALWAYS))] = _NOBODY
        # Those of revoked keys are forgotten; what runs ends all the same.
        usages = {grant.id: self._usages.get(grant.id) or Usage() for grant in grants}
        for grant in grants:
            usages[grant.id].hold_to(grant, self._workers)
        self._usages = usages

    def admit(self, exchange: Exchange, scope: Scope) -> Usage | None:
        """Let a request of the data port in, without its credentials if keys are asked for.

        The exchange has its key's id and tenant from then on.

        Returns:
            Whom to tell that the request has ended; None if no key is asked for.

        Raises:
            TooMany: its key has as many requests as its limits allow, or has used up its tokens.
            ProxyError: it is not let in, as `check` says.
        """
        shown = shown_in(exchange.headers)
        credential = shown.credential
        if credential is not None and (self._asks or credential.startswith(MARK)):
            exchange.headers = without_credentials(exchange.headers, shown)
        grant = self.check(shown, scope, local=not self._asks and exchange.local)
        if grant is None:
            return None
        exchange.tenant, exchange.api_key = grant.tenant, grant.id
        return self.begin(grant, takes_tokens=scope == INFER)

    def begin(self, grant: Grant, *, takes_tokens: bool) -> Usage:
        """Count a request of a key that `check` let in; tell what is returned when it has ended.

        Raises:
            TooMany: the key has as many requests as its limits allow, or has used up its tokens.
        """
        usage = self._usages[grant.id]
        wait_s = usage.begin(monotonic(), takes_tokens=takes_tokens)
        if wait_s is not None:
            raise _too_many(grant, wait_s)
        return usage

    def check(self, shown: Shown, scope: Scope, *, local: bool) -> Grant | None:
        """Return the grant by which a request is let in, or None if no key is asked for.

        Args:
            shown: what its headers say of who calls.
            scope: what a key must be for at this endpoint.
            local: the request comes from this machine; only asked where no key was made.

        Raises:
            NoKey: it shows no key, or one that is wrong or revoked.
            OutOfScope: its key is for something else.
            Forbidden: no key was made, and it comes from another machine.
            KeysUnknown: keys were made, and cannot be read.
        """
        if not self._asks:
            if self._access == "loopback" and (shown.relayed or not local):
                raise _not_local(shown)
            return None
        if self._known is None:
            raise KeysUnknown(
                "The proxy cannot read its API keys, so it lets nobody in. It reads them again as "
                "soon as its keeper reaches the database; its log has the details"
            )
        if shown.credential is None:
            raise NoKey(f"This proxy asks for an API key: {_SEND}", code="missing_api_key")
        grant = self.grant_of(shown.credential)
        if grant is None:
            raise NoKey(
                "The API key is wrong or was revoked: ask whoever runs this proxy for another, and "
                f"{_SEND}",
                code="invalid_api_key",
            )
        if scope not in grant.scopes:
            raise OutOfScope(
                f"The API key is for {', '.join(grant.scopes)}, and this needs {scope}: use a key "
                f"that was made with --scope {scope}",
                code="missing_scope",
            )
        return grant

    def grant_of(self, key: bytes) -> Grant | None:
        """Return what a key is for, or None if it is none; both take the same time.

        A look-up that finds something takes 10 ns longer than one that does not. So there are two,
        of which one does.
        """
        known = self._grants.get(key[_ID])
        other = self._grants.get(_ALWAYS if known is None else _NEVER)
        grant = known or other or _NOBODY
        return grant if compare_digest(hash_of(key), grant.hash) else None


def _too_many(grant: Grant, wait_s: int) -> TooMany:
    limits = [
        f"{number} {what}"
        for number, what in (
            (grant.per_minute, "requests a minute"),
            (grant.at_once, "requests at once"),
            (grant.tokens_per_minute, "tokens a minute"),
        )
        if number is not None
    ]
    return TooMany(
        f"The API key is limited to {' and '.join(limits)}: send this again in {wait_s} s", wait_s
    )


def _not_local(shown: Shown) -> Forbidden:
    why = "it came through a reverse proxy" if shown.relayed else "it comes from another machine"
    return Forbidden(
        f"No API key was made yet, so only this machine may call, and {why}. Make a key with "
        "`pawl keys create NAME`, or open the port to anyone with PAWL_ACCESS=anyone",
        code="not_loopback",
    )


def shown_in(headers: Headers) -> Shown:
    """Return the credentials in a request's headers, and whether it came through a proxy.

    Of several credentials the first that looks like a key counts, else the first.
    """
    pairs: list[tuple[bytes, bytes]] | None = None
    relayed = False
    for pair in headers:
        # Comparing lengths is far cheaper than lowering every name.
        if len(pair[0]) in _SIZES:
            lower = pair[0].lower()
            if lower in CREDENTIALS:
                if pairs is None:
                    pairs = [pair]
                else:
                    pairs.append(pair)
            elif lower in RELAYED:
                relayed = True
    if pairs is None:
        return Shown(relayed=True) if relayed else NOTHING
    credential = _bare(pairs[0][1])
    if len(pairs) > 1:
        credential = next((one for one in map(_key, pairs) if one), credential)
    return Shown(credential, relayed, tuple(pairs))


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
