"""API keys: admit or refuse a request, within the limits of its key.

Every check is in memory. A wrong, a revoked and a valid key cost the same: one hash, a look-up by
the public id, and a comparison in constant time.

The ingester reads the keys from the database and writes them to a file of hashes, which the workers
watch. The file's folder is made when the database is first reached, and stays: if the folder exists
without a readable file, keys may exist but are unknown, and no request is admitted. Without the
folder only this machine may call, and only if `PAWL_ACCESS` is `loopback`.

The tokens that a call took are counted from the bytes of its reply. Whatever the API, a server
reports them in objects called `usage`: at the end of a reply, and in some streams at its beginning
or several times; the largest value of each number counts. Without usage, the token ids that the
proxy requested are counted. Without ids, the tokens are estimated, so that no call is free. Text
that a model writes cannot be mistaken for usage or ids: inside a JSON string quotes are escaped.
"""

import asyncio
import math
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from hmac import compare_digest
from pathlib import Path
from time import monotonic
from typing import Final

import msgspec
import structlog

from proxy.errors import BadRequest, Forbidden, KeysUnknown, NoKey, OutOfScope, TooMany
from proxy.http.exchange import Exchange
from proxy.http.wire import CREDENTIALS, Headers
from proxy.settings import Access
from proxy.spool.folders import PRIVATE_MODE
from store.browsers import why_foreign
from store.files import atomic_folder, sync, write_private
from store.grants import ID_BYTES, KEY_PREFIX, Grant, KeyRing, Scope, hash_of_key

log = structlog.get_logger()

WINDOW_S: Final = 60.0
# Retry delay if too many requests run: any of them may end soon.
BUSY_RETRY_S: Final = 1

# With one level of nested details; possessive, so that no byte is read twice.
_USAGE: Final = re.compile(rb'"usage"\s*:\s*(\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\})')
_IDS: Final = re.compile(rb'"((?:prompt_)?token_ids)"\s*:\s*\[([^\]]*)\]')
_EVENT: Final = re.compile(rb"^data:", re.MULTILINE)
TOTAL_TOKENS: Final = "total_tokens"
# The names that the APIs have for each number.
USAGE_PARTS: Final = (
    ("prompt_tokens", "input_tokens"),
    ("completion_tokens", "output_tokens"),
    ("cache_creation_input_tokens",),
    ("cache_read_input_tokens",),
)
# All other members of a usage are ignored: some servers add costs and times.
USAGE_NUMBERS: Final = frozenset({TOTAL_TOKENS}.union(*USAGE_PARTS))
BYTES_A_TOKEN: Final = 4
# A longer reply is not inflated to find its usage: its tokens are estimated from its length.
MOST_INFLATED: Final = 32 * 2**20

_usages = msgspec.json.Decoder(dict[str, msgspec.Raw])
_number = msgspec.json.Decoder(int)


def share_of_limit(limit: int | None, workers: int) -> int | None:
    """Return one worker's share of a limit, rounded up, so that no key is locked out."""
    return None if limit is None else math.ceil(limit / workers)


class Usage:
    """A key's use of one worker: running requests, and requests and tokens of the last minute."""

    __slots__ = (
        "_at_once",
        "_begun",
        "_most_statements",
        "_per_minute",
        "_running",
        "_spent",
        "_taken",
        "_tokens",
    )

    def __init__(self) -> None:
        """Begin without a request, and without limits."""
        self._per_minute: int | None = None
        self._most_statements: int | None = None
        self._at_once: int | None = None
        self._tokens: int | None = None
        self._begun: deque[float] = deque()
        self._running = 0
        # End and tokens of each call of the last minute, and the sum of the tokens.
        self._taken: deque[tuple[float, int]] = deque()
        self._spent = 0

    @property
    def counts_tokens(self) -> bool:
        """Return whether the key has a limit of tokens, so that they must be counted."""
        return self._tokens is not None

    def set_limits(self, grant: Grant, workers: int) -> None:
        """Set this worker's share of a key's limits, which are divided among `workers` workers."""
        self._per_minute = share_of_limit(grant.per_minute, workers)
        self._most_statements = grant.per_minute
        self._at_once = share_of_limit(grant.at_once, workers)
        self._tokens = share_of_limit(grant.tokens_per_minute, workers)
        if self._per_minute is None:
            self._begun.clear()
        if self._tokens is None:
            self._taken.clear()
            self._spent = 0

    def begin(self, now: float, *, takes_tokens: bool = True) -> int | None:
        """Admit and count a request: return None, or the seconds to wait if a limit is reached.

        `now` is in seconds on a monotonic clock. A refused request does not count. The limit of
        tokens applies only if the request takes tokens.
        """
        if self._at_once is not None and self._running >= self._at_once:
            return BUSY_RETRY_S
        wait_s = self._seconds_until_tokens(now) if takes_tokens else None
        if wait_s is not None:
            return wait_s
        wait_s = self._count(now, 1)
        if wait_s is None:
            self._running += 1
        return wait_s

    def count_statements(self, now: float, number: int) -> None:
        """Count a request that has begun as `number` requests, one for each statement.

        Raises:
            BadRequest: there are more statements than the key may send in a minute.
            TooMany: the limit leaves no room for them now; the request counts once.
        """
        if self._per_minute is None or self._most_statements is None:
            return
        limit_text = f"The API key is limited to {self._most_statements} statements a minute"
        if number > self._most_statements:
            raise BadRequest(f"{limit_text}, and the body holds {number}: send them in parts")
        # More than this worker's share is accepted if no other request came in the minute.
        share = min(number, self._per_minute)
        if self._count(now, share - 1) is not None:
            wait_s = self._count(now, share) or BUSY_RETRY_S
            raise TooMany(f"{limit_text}: send this again in {wait_s} s", wait_s)
        self._begun.extend([now] * (number - share))

    def _count(self, now: float, number: int) -> int | None:
        """Count `number` requests and return None, or count none and return the seconds to wait."""
        begun, limit = self._begun, self._per_minute
        if limit is None:
            return None
        while begun and begun[0] <= now - WINDOW_S:
            begun.popleft()
        if (over := len(begun) + number - limit) > 0:
            return _seconds_until_old(begun[over - 1], now)
        begun.extend([now] * number)
        return None

    def charge_tokens(self, now: float, tokens: int) -> None:
        """Count the tokens of a call that has ended."""
        if self._tokens is not None and tokens:
            self._taken.append((now, tokens))
            self._spent += tokens

    def end(self) -> None:
        """Note that a running request has ended, with whatever result."""
        self._running -= 1

    def _seconds_until_tokens(self, now: float) -> int | None:
        """Return the seconds until the tokens are below the limit, or None if they are now."""
        if self._tokens is None:
            return None
        taken = self._taken
        while taken and taken[0][0] <= now - WINDOW_S:
            self._spent -= taken.popleft()[1]
        remaining = self._spent
        wait_s = None
        for ended, tokens in taken:
            if remaining < self._tokens:
                break
            remaining -= tokens
            wait_s = _seconds_until_old(ended, now)
        return wait_s


def _seconds_until_old(at: float, now: float) -> int:
    """Return the seconds, rounded up, from `now` until `at` is a minute ago."""
    # Sums of seconds are rounded, so compare as `begin` will compare then.
    wait_s = math.ceil(at + WINDOW_S - now)
    return wait_s if at <= now + wait_s - WINDOW_S else wait_s + 1


def tokens_of(
    request: bytes,
    reply: bytes,
    *,
    deflated: bool = False,
    refused: bool = False,
    whole_bytes: int = 0,
) -> int:
    """Return how many tokens a call took: those of its prompt and of all its choices.

    `reply` is JSON or events, deflated (zlib) if `deflated`; an empty reply costs nothing. An error
    (`refused`) costs only tokens that it reports. `whole_bytes` is the length of a reply of which
    only the beginning was kept, else 0; such a call is estimated from that length.
    """
    if whole_bytes:
        return math.ceil((len(request) + whole_bytes) / BYTES_A_TOKEN)
    if not reply:
        return 0
    if deflated:
        inflater = zlib.decompressobj()
        reply = inflater.decompress(reply, MOST_INFLATED)
        if not inflater.eof:
            return math.ceil((len(request) + MOST_INFLATED) / BYTES_A_TOKEN)
    counted = _reported_tokens(_USAGE.findall(reply)) or _count_ids(reply)
    return counted or (0 if refused else _estimate_tokens(request, reply))


def _reported_tokens(usages: Iterable[bytes]) -> int:
    largest: dict[str, int] = {}
    for usage in usages:
        try:
            numbers = {
                name: _number.decode(raw)
                for name, raw in _usages.decode(usage).items()
                if name in USAGE_NUMBERS and bytes(raw)[:1].isdigit()
            }
        except msgspec.MsgspecError:
            # Text that only looks like a usage: the call is charged by its ids or its length.
            continue
        largest = {
            name: max(largest.get(name, 0), numbers.get(name, 0)) for name in largest | numbers
        }
    parts = sum(max(largest.get(name, 0) for name in names) for names in USAGE_PARTS)
    return max(largest.get(TOTAL_TOKENS, 0), parts)


def _count_ids(reply: bytes) -> int:
    """Return how many token ids a reply has, prompt and choices; a repeated prompt counts once."""
    prompt = sampled = 0
    for name, ids in _IDS.findall(reply):
        number = ids.count(b",") + 1 if ids.strip() else 0
        if name == b"token_ids":
            sampled += number
        else:
            prompt = max(prompt, number)
    return prompt + sampled


def _estimate_tokens(request: bytes, reply: bytes) -> int:
    """Estimate a call's tokens from the lengths of its bodies; each event of a stream is one."""
    events = len(_EVENT.findall(reply))
    return math.ceil(len(request) / BYTES_A_TOKEN) + (
        events or math.ceil(len(reply) / BYTES_A_TOKEN)
    )


ACCESS_FOLDER: Final = "access"
FILE_NAME: Final = "keys.json"
WATCH_S: Final = 0.1
NO_KEYS: Final = KeyRing(made=False)
UNSEEN: Final = KeyRing(made=False, seen=False)
# Identifies one content of the file: time of change and inode, or a word where there is no file.
Mark = tuple[int, int] | str

_ID: Final = slice(len(KEY_PREFIX), len(KEY_PREFIX) + 2 * ID_BYTES)
# Compared with keys of an unknown id: no key has this hash.
_NOBODY: Final = Grant(id="", hash=bytes(32), scopes=())
# An id that is always in the table, for `_NOBODY`, and an id that never is; no key has either.
_PRESENT_ID: Final = bytes(2 * ID_BYTES)
_ABSENT_ID: Final = b"\1" * (2 * ID_BYTES)
_HOW_TO_MAKE: Final = "`pawl keys create NAME`"
_HOW_TO_SEND: Final = "send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"

# Headers by which a reverse proxy says that it relays a request (RFC 7239, RFC 9110 §7.6.3, and
# their older forms).
RELAY_HEADERS: Final = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"})
_SIZES: Final = frozenset(map(len, CREDENTIALS | RELAY_HEADERS))


class ShownCredentials(msgspec.Struct, frozen=True, gc=False):
    """The credentials that a request shows in its headers.

    `credential`: the one to check. `relayed`: a reverse proxy passed the request on. `headers`: all
    headers with credentials.
    """

    credential: bytes | None = None
    relayed: bool = False
    headers: tuple[tuple[bytes, bytes], ...] = ()


NO_CREDENTIALS: Final = ShownCredentials()


class KeyChecker:
    """Check the credentials of requests against the known keys, and enforce the keys' limits."""

    def __init__(self, access: Access, workers: int = 1, hosts: tuple[str, ...] = ()) -> None:
        """Begin without knowing the keys: no request is admitted until `replace_keys`.

        Each of `workers` workers enforces its share of a key's limits. `hosts`:
        `PAWL_ALLOWED_HOSTS`.
        """
        self._access = access
        self._hosts = hosts
        self._workers = workers
        self._usages: dict[str, Usage] = {}
        self._known: KeyRing | None = None
        self._grants: dict[bytes, Grant] = {bytes(bytearray(_PRESENT_ID)): _NOBODY}
        self._needs_key = True

    @property
    def knows_keys(self) -> bool:
        """Return whether the keys have been read; until then no request is admitted."""
        return self._known is not None

    def replace_keys(self, ring: KeyRing | None) -> None:
        """Replace the known keys; if `ring` is None, they cannot be read, and old keys stay valid.

        Old keys also stay if the ring states that no key was ever made: then the file was removed.
        Until the database was reached (`seen`), the keys are unknown, unless access is `loopback`.
        """
        if ring is not None and not ring.seen and self._access != "loopback":
            ring = None
        if (ring is None or not ring.made) and self._known is not None and self._known.made:
            return
        self._known = ring
        self._needs_key = ring is None or ring.made or self._access == "keys"
        grants = () if ring is None else ring.grants
        self._grants = {grant.id.encode(): grant for grant in grants}
        # A copy, so that its bytes are compared like those of any key's id.
        self._grants[bytes(bytearray(_PRESENT_ID))] = _NOBODY
        # Usages of revoked keys are forgotten; requests that still run keep a reference.
        usages = {grant.id: self._usages.get(grant.id) or Usage() for grant in grants}
        for grant in grants:
            usages[grant.id].set_limits(grant, self._workers)
        self._usages = usages

    def admit(self, exchange: Exchange, scope: Scope) -> Usage | None:
        """Admit a request of the data port; set the exchange's tenant, and its key's id and name.

        The request's credentials are removed if keys are required, or if they look like a key of
        Pawl.

        Returns:
            The key's usage, whose `end` must be called; None if no key is required.

        Raises:
            TooMany: the key's limit of requests or tokens is used up.
            ProxyError: as `check` does.
        """
        shown = credentials_in(exchange.headers)
        credential = shown.credential
        if credential is not None and (self._needs_key or credential.startswith(KEY_PREFIX)):
            exchange.headers = without_credentials(exchange.headers, shown)
        local = not self._needs_key and exchange.is_local
        grant = self.check(shown, scope, (exchange.method, exchange.headers), local=local)
        if grant is None:
            return None
        exchange.tenant, exchange.api_key = grant.tenant, grant.id
        exchange.key_name = grant.name
        return self.count_request(grant, takes_tokens=scope == "infer")

    def count_request(self, grant: Grant, *, takes_tokens: bool) -> Usage:
        """Count a request that `check` admitted; the caller must call the returned usage's `end`.

        Raises:
            TooMany: the key's limit of requests or tokens is used up.
        """
        usage = self._usages[grant.id]
        wait_s = usage.begin(monotonic(), takes_tokens=takes_tokens)
        if wait_s is not None:
            raise _too_many(grant, wait_s)
        return usage

    def check(
        self, shown: ShownCredentials, scope: Scope, request: tuple[str, Headers], *, local: bool
    ) -> Grant | None:
        """Return the grant of a request's key, or None if no key is required.

        `request` is its method and headers. `local` says whether it comes from this machine, which
        matters only if no key was made.

        Raises:
            NoKey: the request has no key, or a wrong or revoked one.
            OutOfScope: the key lacks the scope.
            Forbidden: no key was made, and the request comes from another machine, or may come
                from a web page of another site.
            KeysUnknown: keys may have been made, and cannot be read.
        """
        if not self._needs_key:
            if self._access == "loopback" and (shown.relayed or not local):
                raise _not_local(shown)
            why = why_foreign(*request, self._hosts, loopback=self._access == "loopback")
            if why is not None:
                raise Forbidden(f"{why}, or make a key with {_HOW_TO_MAKE}", code="foreign_page")
            return None
        if self._known is None:
            raise KeysUnknown(
                "The proxy cannot read its API keys, so it admits no request. It reads them again "
                "as soon as its ingester reaches the database; its log has the details"
            )
        if shown.credential is None:
            raise NoKey(f"This proxy requires an API key: {_HOW_TO_SEND}", code="missing_api_key")
        grant = self.grant_of(shown.credential)
        if grant is None:
            raise NoKey(
                "The API key is wrong or was revoked: ask whoever runs this proxy for another, and "
                f"{_HOW_TO_SEND}",
                code="invalid_api_key",
            )
        if scope not in grant.scopes:
            raise OutOfScope(
                f"The API key is for {', '.join(grant.scopes)}, and this request needs {scope}: "
                f"use a key that was made with --scope {scope}",
                grant.name,
            )
        return grant

    def grant_of(self, key: bytes) -> Grant | None:
        """Return the grant of a key, or None if the key is not valid; both take the same time.

        A look-up that succeeds takes 10 ns longer than one that fails, so of the two look-ups here
        exactly one succeeds.
        """
        known = self._grants.get(key[_ID])
        other = self._grants.get(_PRESENT_ID if known is None else _ABSENT_ID)
        grant = known or other or _NOBODY
        return grant if compare_digest(hash_of_key(key), grant.hash) else None


def _too_many(grant: Grant, wait_s: int) -> TooMany:
    limits = [
        f"{number} {unit}"
        for number, unit in (
            (grant.per_minute, "requests a minute"),
            (grant.at_once, "requests at once"),
            (grant.tokens_per_minute, "tokens a minute"),
        )
        if number is not None
    ]
    return TooMany(
        f"The API key is limited to {' and '.join(limits)}: send this again in {wait_s} s", wait_s
    )


def _not_local(shown: ShownCredentials) -> Forbidden:
    origin = "through a reverse proxy" if shown.relayed else "from another machine"
    return Forbidden(
        "No API key was made yet, so only this machine may call, and the request came "
        f"{origin}. Make a key with {_HOW_TO_MAKE}, or open the port to anyone with "
        "PAWL_ACCESS=anyone",
        code="not_loopback",
    )


def credentials_in(headers: Headers) -> ShownCredentials:
    """Return the credentials in a request's headers, and whether it came through a reverse proxy.

    Of several credentials, the first that looks like a key of Pawl is checked, else the first.
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
            elif lower in RELAY_HEADERS:
                relayed = True
    if pairs is None:
        return ShownCredentials(relayed=True) if relayed else NO_CREDENTIALS
    credential = _without_bearer(pairs[0][1])
    if len(pairs) > 1:
        credential = next(filter(None, map(_key_in_header, pairs)), credential)
    return ShownCredentials(credential, relayed, tuple(pairs))


def without_credentials(headers: Headers, shown: ShownCredentials) -> Headers:
    """Return the headers without `shown.headers`, which have the client's credentials."""
    kept = headers.copy()
    for pair in shown.headers:
        kept.remove(pair)
    return kept


def _key_in_header(pair: tuple[bytes, bytes]) -> bytes:
    """Return the key of Pawl in a header, without `Bearer`; empty bytes if there is none."""
    value = _without_bearer(pair[1])
    return value if value.startswith(KEY_PREFIX) else b""


def _without_bearer(value: bytes) -> bytes:
    """Return a header's value without outer blanks and `Bearer`, upper or lower case (RFC 6750)."""
    return value[7:].strip() if value[:7].lower() == b"bearer " else value.strip()


class KeyFile:
    """The file below the spool directory from which the workers read the API keys."""

    def __init__(self, spool_dir: Path) -> None:
        """Set the path; nothing is read or written yet."""
        self._path = spool_dir / ACCESS_FOLDER / FILE_NAME
        self._seen: Mark | None = None

    def write(self, ring: KeyRing) -> None:
        """Replace the file atomically and durably.

        Raises:
            OSError: the disk failed or is full; the file is as it was.
        """
        folder, content = self._path.parent, msgspec.json.encode(ring)
        if folder.exists():
            partial = self._path.with_suffix(".part")
            write_private(partial, content)
            partial.replace(self._path)
            sync(folder)
        else:
            # The folder must never exist without the file.
            partial = folder.with_suffix(".part")
            with atomic_folder(folder, partial):
                partial.chmod(PRIVATE_MODE)
                write_private(partial / FILE_NAME, content)

    def has_changed(self) -> bool:
        """Return whether the file changed since the last call."""
        seen, self._seen = self._seen, self._mark()
        return self._seen != seen

    def read(self) -> KeyRing | None:
        """Return the keys, `UNSEEN` if none were ever written, or None (logged) if unreadable."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=KeyRing)
        except FileNotFoundError as error:
            if not self._path.parent.exists():
                return UNSEEN
            reason: Exception = error
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            reason = error
        log.error("keys_unreadable", path=str(self._path), reason=str(reason))
        return None

    async def watch(self, take: Callable[[KeyRing | None], None]) -> None:
        """Call `take` with the result of `read`, at once and after each change; never return."""
        while True:
            if self.has_changed():
                take(self.read())
            await asyncio.sleep(WATCH_S)

    def _mark(self) -> Mark:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return "lost" if self._path.parent.exists() else "none"
        except OSError:
            return "lost"
        return status.st_mtime_ns, status.st_ino
