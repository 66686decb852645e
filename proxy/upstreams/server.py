"""Send requests to a model server (one or several replicas of the same models), and read replies.

A request is sent again in three cases only, because a model must not answer a call twice. If it
could not be sent to one replica, it goes to the next. If a server does not know the version, or
refuses the fields that the proxy added, the call is sent again (`Call._retry_refused`).

Token ids can only be removed from a decoded reply. So a request for token ids asks for a reply
without content coding (`identity`), but some servers and balancers compress all the same. A
compressed stream is passed on decoded. A non-streamed reply from which nothing was removed is
passed on in its original coding.
"""

import asyncio
import re
import ssl
import zlib
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import structlog

from proxy.errors import (
    NoModels,
    ProxyError,
    Redirected,
    UnreadableCoding,
    UpstreamBroke,
    UpstreamSilent,
    UpstreamUnreachable,
)
from proxy.formats.raw_json import UNREADABLE
from proxy.http import client
from proxy.http.client import (
    NoReply,
    NotSent,
    Pool,
    Silent,
    Torn,
    ask,
)
from proxy.http.exchange import BodyStream, Grown
from proxy.http.wire import CREDENTIALS, JSON, Headers
from proxy.upstreams.file import Style
from proxy.upstreams.litellm import LitellmReply
from store.settings import without_login

EVENT_STREAM: Final = b"text/event-stream"
CODING: Final = b"content-encoding"
NO_CODING: Final = (b"", b"identity")
# RFC 9110 §8.4.1; `deflate` is defined as zlib's format, but some send it without its header.
DECODABLE: Final = (b"gzip", b"x-gzip", b"deflate")
GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS
RAW_DEFLATE: Final = -zlib.MAX_WBITS
MAGIC: Final = b"\x1f\x8b"
FIRST_ERROR_STATUS: Final = 400
# Bytes decoded at once: a small piece may decode to very many.
DECODED_STEP_BYTES: Final = 256 * 1024


class Decoder:
    """Decode a body piece by piece, including all members of a gzip file."""

    def __init__(self) -> None:
        self._engine = zlib.decompressobj(GZIP_OR_ZLIB)
        self._begun = False

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yield the decoded `data`, at most `DECODED_STEP_BYTES` bytes at once.

        Raises:
            Torn: the data is neither gzip nor deflate.
        """
        while data:
            try:
                piece = self._engine.decompress(data, DECODED_STEP_BYTES)
            except zlib.error as error:
                if self._begun:
                    raise Torn(f"its content coding is broken: {error}") from error
                self._engine, self._begun = zlib.decompressobj(RAW_DEFLATE), True
                continue
            self._begun = True
            if piece:
                yield piece
            data = self._engine.unconsumed_tail
            if self._engine.eof:
                data = self._next_member(self._engine.unused_data)

    def _next_member(self, data: bytes) -> bytes:
        """Continue with the next gzip member; other trailing bytes are ignored, as gzip does."""
        if not data.startswith(MAGIC):
            return b""
        self._engine = zlib.decompressobj(GZIP_OR_ZLIB)
        return data

    def check_end(self) -> None:
        """Check that the coded data came to its end.

        Raises:
            Torn: it broke off.
        """
        if self._begun and not self._engine.eof:
            raise Torn("its content coding breaks off")


class DecodedReply:
    """A reply with its content coding removed; `coded` is the original one."""

    def __init__(self, reply: "Reply") -> None:
        """Wrap `reply`, whose coding is one of `DECODABLE`."""
        self.coded = reply
        self.raw = b""
        self.status: int = reply.status
        self.reason: bytes = reply.reason
        self.headers: Headers = [pair for pair in reply.headers if pair[0].lower() != CODING]
        self._decoder = Decoder()
        self._ended = False

    def header(self, wanted: bytes) -> bytes | None:
        """Return a header's value, or None if it is missing or `Content-Encoding`."""
        return None if wanted == CODING else self.coded.header(wanted)

    @property
    def fully_read(self) -> bool:
        """Return whether `pieces` has yielded the whole body."""
        return self._ended

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the decoded body as it comes.

        Raises:
            Torn: the body or its coding broke off.
        """
        async for data in self.coded.pieces():
            for piece in self._decoder.decode(data):
                yield piece
        self._decoder.check_end()
        self._ended = True

    async def read(self, limit: int | None = None, grown: Grown | None = None) -> bytes | None:
        """Return the whole decoded body, or None once that is longer than `limit` bytes.

        `grown` is called with the number of coded bytes that have arrived.

        Raises:
            Torn: the body or its coding broke off.
        """
        raw = await self.coded.read(limit, grown)
        if raw is None:
            return None
        self.raw = raw
        pieces, size = [], 0
        for piece in self._decoder.decode(raw):
            pieces.append(piece)
            size += len(piece)
            if limit is not None and size > limit:
                return None
        self._decoder.check_end()
        return b"".join(pieces)

    def unread_bytes(self) -> bytes:
        """Return the bytes of a torn body, still coded, for they may not be decodable."""
        return self.raw or self.coded.unread_bytes()

    def close(self) -> None:
        """Close the original reply."""
        self.coded.close()

    def discard(self) -> None:
        """Discard the original reply and its connection."""
        self.coded.discard()


# A reply whose head has come; its body may still be on its way.
Reply = client.Reply | LitellmReply | DecodedReply


def is_event_stream(reply: Reply) -> bool:
    """Return whether a reply is a stream of events without a content coding."""
    kind = reply.header(b"content-type") or b""
    return kind.startswith(EVENT_STREAM) and not reply.header(b"content-encoding")


def decode_reply(reply: Reply) -> Reply:
    """Return the reply without content coding; an error in an unknown coding as it is.

    Raises:
        UnreadableCoding: the reply is not an error and has an unknown coding, so that the fields
            that the proxy asked for cannot be removed from it.
    """
    coding = (reply.header(CODING) or b"").strip().lower()
    if coding in NO_CODING:
        return reply
    if coding in DECODABLE:
        return DecodedReply(reply)
    if reply.status >= FIRST_ERROR_STATUS:
        return reply
    name = coding.decode("latin-1")[:40]
    raise UnreadableCoding(
        f"The model server was asked for a reply without content coding, and sent one in {name!r}, "
        "which this proxy cannot decode to take out the token ids that it asked for. Turn "
        "compression off there, or in what stands before it",
        code="unreadable_coding",
    )


def restore_coding(reply: Reply, body: bytes, out: bytes) -> tuple[Headers, bytes]:
    """Return the headers and body to send for `out`, which was made from the decoded `body`.

    If `out` equals `body`, they are the original ones, with their coding.
    """
    if isinstance(reply, DecodedReply) and out == body:
        return reply.coded.headers, reply.raw
    return reply.headers, out


LOCATION: Final = b"location"
REDIRECTS: Final = range(300, 400)
# Locations that stay at this proxy. Browsers read a backslash as a slash and drop tabs, so neither
# may follow the first slash.
_STAYS: Final = re.compile(rb"(?:/(?![/\\\t])|\?|#|\.{1,2}(?:/|\Z)|\Z)")


def check_redirect(reply: Reply, api_key: str | None) -> None:
    """Check that a reply does not redirect a client with a key of this proxy to another address.

    `api_key` is the id of the client's key, None if no key is required.

    Clients follow a redirect by themselves, and some send their headers to the new address: HTTP
    libraries drop `Authorization` for another host, but not `x-api-key`.

    Raises:
        Redirected: the reply redirects such a client.
    """
    if api_key is None or reply.status not in REDIRECTS:
        return
    for name, value in reply.headers:
        if name.lower() == LOCATION and _STAYS.match(value.strip()) is None:
            raise Redirected(
                f"The model server answered {reply.status} and sends the client to another "
                "address. That is not passed on, as the client would show its API key of this "
                "proxy there. Set the upstream's address to the one that it names",
                code="upstream_redirects",
            )


log = structlog.get_logger()

ANTHROPIC_PATHS: Final = ("/v1/messages", "/v1/models")
ANTHROPIC_VERSION: Final = (b"anthropic-version", b"2023-06-01")


class UpstreamKey:
    """An upstream's key, sent in place of the client's credentials, and the style of its header."""

    __slots__ = ("_bearer", "_plain", "_style")

    def __init__(self, secret: str, style: Style) -> None:
        """Prepare the headers `Authorization` and `x-api-key`; `style` decides which is sent."""
        self._style = style
        self._bearer = (b"Authorization", b"Bearer " + secret.encode())
        self._plain = (b"x-api-key", secret.encode())

    def with_key(self, headers: Headers, target: str) -> Headers:
        """Return `headers` with this key and without the client's credentials."""
        kept = [pair for pair in headers if pair[0].lower() not in CREDENTIALS]
        if self._style == "anthropic" and target.startswith(ANTHROPIC_PATHS):
            if not any(name.lower() == ANTHROPIC_VERSION[0] for name, _ in kept):
                kept.append(ANTHROPIC_VERSION)
            return [*kept, self._plain]
        return [*kept, self._plain if self._style == "x-api-key" else self._bearer]


# How long a replica may take to list its models while a call waits.
LIST_S: Final = 2.0
# A list with more bytes is not read.
LIST_BYTES: Final = 4 << 20
# A list of this age is still valid: no server restarts in so short a time.
LIST_AGE_S: Final = 0.1
LIST_ERRORS: Final = (NotSent, NoReply, Torn, TimeoutError, *UNREADABLE)


class Listing:
    """The names that a replica lists, at most `LIST_AGE_S` old."""

    def __init__(self, pool: Pool, target: str) -> None:
        """Store the connections to the replica, and the list's path."""
        self._pool = pool
        self._target = target
        self._names: Collection[str] = ()
        self._begun = float("-inf")
        self._list_lock = asyncio.Lock()

    async def lists_name(self, name: str, headers: Headers) -> bool:
        """Return whether the replica lists `name` now; False if it does not answer.

        Of `headers`, only the credentials are sent: the upstream's key, else the client's.
        """
        clock = asyncio.get_running_loop().time
        asked = clock()
        async with self._list_lock:
            # A look that began after this call asked is fresh enough: a call waits for at most two
            # looks, however many calls wait.
            if asked - self._begun > LIST_AGE_S:
                begun = clock()
                self._names = await self._fetch_names(headers)
                self._begun = begun
            return name in self._names

    async def _fetch_names(self, headers: Headers) -> Collection[str]:
        shown = [pair for pair in headers if pair[0].lower() in CREDENTIALS]
        try:
            async with asyncio.timeout(LIST_S):
                reply = await ask(self._pool, "GET", self._target, shown, None)
                try:
                    body = await reply.read(LIST_BYTES) or b""
                finally:
                    reply.close()
            return {model.id for model in msgspec.json.decode(body, type=_Listed).data}
        except LIST_ERRORS as error:
            log.info("names_unknown", replica=self._pool.authority, reason=type(error).__name__)
            return ()


class _ListedName(msgspec.Struct):
    id: str


class _Listed(msgspec.Struct):
    data: list[_ListedName]


# A conversation and a system message after it, to find out where a chat template puts system
# messages. The presence of tools may select another template.
PROBE_MESSAGES: Final = ({"role": "system", "content": "One"}, {"role": "user", "content": "Two"})
PROBE_INLINE: Final = {"role": "system", "content": "Three"}
PROBE_TOOL: Final = {
    "type": "function",
    "function": {"name": "four", "parameters": {"type": "object"}},
}
# No model server restarts, with another template, in so short a time.
TEMPLATE_S: Final = 10.0
VLLM_OWNER: Final = "vllm"
LIST_WAIT_S: Final = 10.0
# A name that is missing from the server's list of models may come later. The list is fetched at
# most once in so many seconds, whatever names clients ask for.
LIST_EVERY_S: Final = 2.0
# A server that did not answer may be starting, so it is tried again sooner.
RETRY_S: Final = 0.5
# A server that lists new names each time must not fill the memory.
MOST_NAMES: Final = 10_000
# A replica that could not be reached is tried last for this long.
AVOID_S: Final = 2.0
SWEEP_S: Final = 1.0
CLIENT_ERRORS: Final = range(400, 500)


class Replica:
    """One server of an upstream: its address, and the connections to it."""

    def __init__(self, base_url: str, tls: ssl.SSLContext | None) -> None:
        """Parse the address; connections are opened as they are needed."""
        parts = urlsplit(base_url)
        secure = parts.scheme == "https"
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        # The server's name in logs; messages to clients have the upstream's name instead.
        self.root = without_login(f"{parts.scheme}://{parts.netloc}{self.prefix}")
        self.pool = Pool(
            parts.hostname or "", parts.port or (443 if secure else 80), tls=tls if secure else None
        )
        self.avoid_until = 0.0
        self.listing = Listing(self.pool, f"{self.prefix}/v1/models")


class Upstream:
    """Send requests to one model server's replicas, the least busy first.

    A request is retried at another replica only if nothing of it was sent: a model must not answer
    one call twice.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        silence_s: float,
        key: UpstreamKey | None = None,
        called: str = "The model server that PAWL_UPSTREAM_URL names",
    ) -> None:
        """Prepare the replicas at the base URLs `urls`; `called` is the name in error messages.

        A reply is given up after `silence_s` seconds of silence. `key` is sent in place of the
        client's credentials.
        """
        tls = ssl.create_default_context() if any(u.startswith("https") for u in urls) else None
        self.replicas = [Replica(url, tls) for url in urls]
        self._silence_s = silence_s
        self._key = key
        # Whether requests are sent with our own key in place of the client's.
        self.sends_own_key = key is not None
        self._called = called
        # Whether a model gives ids, by its name: only names that the server listed or our trainer
        # loaded, never those of requests, which could fill the memory.
        self._gives_ids: dict[str, bool] = {}
        self._next_list_at = 0.0
        self._list_lock = asyncio.Lock()
        # Whether a model's template keeps system messages in place, and until when that holds.
        self._keeps_system: dict[str, tuple[bool, float]] = {}
        self._template_lock = asyncio.Lock()

    async def ask(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | BodyStream | None,
        length: int | None = None,
    ) -> Reply:
        """Send a request, and return the reply once its head has come; see `client.ask`.

        Raises:
            UpstreamUnreachable: no replica could be reached; nothing was sent.
            UpstreamBroke: the request was sent, and no reply came.
        """
        headers = self._with_key(headers, target)
        for replica in self._least_busy_first():
            try:
                return await ask(
                    replica.pool, method, replica.prefix + target, headers, body, length
                )
            except NotSent as error:
                self._avoid_replica(replica, error)
            except NoReply as error:
                raise self._broken_reply_error(replica, error) from error
        raise UpstreamUnreachable(
            f"{self._called} could not be reached. Is it running, and is its address right? The "
            "proxy's log has the address and the reason",
            code="upstream_unreachable",
        )

    async def ask_where_served(
        self, model: str, method: str, target: str, headers: Headers, body: bytes
    ) -> Reply | None:
        """Send a request to a replica that lists `model` now, or return None if none does.

        For a while, calls try replicas without the model last: they refuse at once and look idle.

        Raises:
            UpstreamBroke: the request was sent, and no reply came.
        """
        headers = self._with_key(headers, target)
        replicas = self._least_busy_first()
        lists = await asyncio.gather(*(one.listing.lists_name(model, headers) for one in replicas))
        have = {id(one) for one, listed in zip(replicas, lists, strict=True) if listed}
        until = asyncio.get_running_loop().time() + AVOID_S
        # Sorted again: calls that waited together must not all go to the same replica.
        for replica in self._least_busy_first():
            if id(replica) not in have:
                replica.avoid_until = until
                continue
            try:
                return await ask(replica.pool, method, replica.prefix + target, headers, body)
            except NotSent as error:
                self._avoid_replica(replica, error)
            except NoReply as error:
                raise self._broken_reply_error(replica, error) from error
        return None

    async def fetch(self, target: str, headers: Headers) -> Reply:
        """Send a GET request as `ask` does: with the upstream's key, if it has one."""
        return await self.ask("GET", target, headers, None)

    def _with_key(self, headers: Headers, target: str) -> Headers:
        """Return `headers` with the upstream's key, or without one as the client sent them."""
        return headers if self._key is None else self._key.with_key(headers, target)

    def _least_busy_first(self) -> list[Replica]:
        if len(self.replicas) == 1:
            return self.replicas
        now = asyncio.get_running_loop().time()
        return sorted(self.replicas, key=lambda r: (r.avoid_until > now, r.pool.requests_under_way))

    def _avoid_replica(self, replica: Replica, error: NotSent) -> None:
        replica.avoid_until = asyncio.get_running_loop().time() + AVOID_S
        log.warning("replica_unreachable", replica=replica.root, reason=str(error))

    def _broken_reply_error(self, replica: Replica, error: NoReply) -> UpstreamBroke:
        log.warning("replica_gave_no_reply", replica=replica.root, reason=str(error))
        silent = isinstance(error, Silent)
        kind = UpstreamSilent if silent else UpstreamBroke
        return kind(
            f"{self._called} was sent the request and gave no reply: {error}. "
            "It is unknown whether the server worked on the request.",
            code="upstream_silent" if silent else "upstream_broke",
        )

    async def gives_ids(self, model: str | None) -> bool:
        """Return whether `model` is served by vLLM, which gives token ids on request."""
        if model is None:
            return False
        known = self._gives_ids.get(model)
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        if self._list_lock.locked() or loop.time() >= self._next_list_at:
            # Calls that come while the list is being fetched wait for that one answer.
            async with self._list_lock:
                if loop.time() >= self._next_list_at:
                    listed = await self._fetch_vllm_flags()
                    self._next_list_at = loop.time() + (RETRY_S if listed is None else LIST_EVERY_S)
                    self._remember(listed or {})
        return self._gives_ids.get(model, False)

    async def keeps_system(self, model: str) -> bool:
        """Return whether a model's chat template keeps system messages in place.

        It does if a system message at the end only extends the prompt; it does not if the template
        raises an error, drops the message, or moves it. The server is asked at most every
        `TEMPLATE_S`, and has `LIST_S` to answer; without an answer, the last one counts, or False.
        Call this only for models that `gives_ids` accepts.
        """
        clock = asyncio.get_running_loop().time
        keeps, until = self._keeps_system.get(model, (False, float("-inf")))
        if clock() < until:
            return keeps
        async with self._template_lock:
            keeps, until = self._keeps_system.get(model, (False, float("-inf")))
            if clock() >= until:
                try:
                    async with asyncio.timeout(LIST_S):
                        kept = await asyncio.gather(
                            *(self._template_keeps_system(model, t) for t in ([], [PROBE_TOOL]))
                        )
                    keeps = all(kept)
                except (ProxyError, Torn, TimeoutError, *UNREADABLE) as error:
                    log.warning("template_unknown", model=model, reason=type(error).__name__)
                if len(self._keeps_system) >= MOST_NAMES:
                    self._keeps_system = {}
                self._keeps_system[model] = keeps, clock() + TEMPLATE_S
        return keeps

    async def _template_keeps_system(self, model: str, tools: list[dict[str, Any]]) -> bool:
        """Return whether the template with these tools keeps a system message in place."""
        before, after = await asyncio.gather(
            *(
                self._prompt(model, turns, tools)
                for turns in (PROBE_MESSAGES, (*PROBE_MESSAGES, PROBE_INLINE))
            )
        )
        return 0 < len(before) < len(after) and after[: len(before)] == before

    async def _prompt(
        self, model: str, messages: Sequence[dict[str, str]], tools: list[dict[str, Any]]
    ) -> list[int]:
        """Return the token ids of the messages' prompt; none if the server refuses the messages."""
        asked = {"model": model, "messages": messages, "add_generation_prompt": False}
        body = msgspec.json.encode(asked | ({"tools": tools} if tools else {}))
        reply = await self.ask("POST", "/tokenize", [JSON], body)
        try:
            answer = await reply.read(LIST_BYTES)
        finally:
            reply.close()
        if reply.status in CLIENT_ERRORS:
            return []
        return msgspec.json.decode(answer or b"", type=_TokenizeReply).tokens

    def _remember(self, gives_ids: dict[str, bool]) -> None:
        if len(self._gives_ids) + len(gives_ids) > MOST_NAMES:
            self._gives_ids = {}
        self._gives_ids |= gives_ids

    async def _fetch_vllm_flags(self) -> dict[str, bool] | None:
        """Return for each listed model whether vLLM serves it; None if no list came."""
        try:
            listed = await self.models([])
        except ProxyError as error:
            log.warning("models_unknown", reason=error.message)
            # A server that answers without a list is not asked again before every call.
            return {} if isinstance(error, NoModels) else None
        return {name: _owner(entry) == VLLM_OWNER for name, entry in listed.items()}

    async def models(self, headers: Headers) -> dict[str, msgspec.Raw]:
        """Return the entries of the server's list at `/v1/models`, by id.

        Raises:
            UpstreamUnreachable: no replica could be reached.
            UpstreamBroke: no list came, or it could not be read.
            NoModels: the server refuses to list its models.
        """
        try:
            async with asyncio.timeout(LIST_WAIT_S):
                reply = await self.fetch("/v1/models", headers)
                try:
                    body = await reply.read(LIST_BYTES)
                finally:
                    reply.close()
        except (Torn, TimeoutError) as error:
            raise UpstreamBroke(
                f"the list of models did not come: {type(error).__name__}"
            ) from error
        if body is None:
            raise UpstreamBroke(f"the list of models has more than {LIST_BYTES >> 20} MiB")
        if reply.status in CLIENT_ERRORS:
            raise NoModels(f"the server refuses to list its models: status {reply.status}")
        try:
            entries = msgspec.json.decode(body, type=_ModelList).data
            return {msgspec.json.decode(entry, type=_ListedModel).id: entry for entry in entries}
        except UNREADABLE as error:
            raise UpstreamBroke(
                f"the list of models cannot be read: status {reply.status}, {error}"
            ) from error

    def learn(self, served_names: Iterable[str]) -> None:
        """Remember names of adapters that our own trainer loaded: they are served by vLLM."""
        self._remember(dict.fromkeys(served_names, True))

    async def sweep(self) -> None:
        """Periodically close idle connections, and those that are silent too long; never return."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for replica in self.replicas:
                replica.pool.sweep(self._silence_s)

    async def close(self) -> None:
        """Close every connection."""
        for replica in self.replicas:
            replica.pool.close()


class _ListedModel(msgspec.Struct):
    id: str
    owned_by: str | None = None


class _TokenizeReply(msgspec.Struct):
    tokens: list[int]


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


def _owner(entry: msgspec.Raw) -> str | None:
    return msgspec.json.decode(entry, type=_ListedModel).owned_by
