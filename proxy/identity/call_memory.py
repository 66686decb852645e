"""Find the episode of an unnamed call by the content it repeats (pure, bounded memory).

A call provides fingerprints of content that later calls may repeat, and needs the fingerprints of
content that it repeats. A fingerprint has 16 bytes; the first is its kind. Provided fingerprints
are remembered with their call's episode. A call that needs such a fingerprint joins that episode,
if only one call can have provided it. If two episodes provided it, the call is in doubt and joins
neither: a join is never guessed (docs/decisions/012-identity.md). Text without a unique id may
occur in many conversations, also at other proxies: its fingerprints join nothing here, and the
database decides. A request that an SDK sends again after a failure joins the failed attempt.

Fingerprints and failed attempts of another tenant are never found (`store.tenants.keyed_digests`).

Fingerprints are stored with the record. The database knows the fingerprints that the calls of all
proxies provide, and makes the joins that a single proxy must not make.
"""

from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

import msgspec

from proxy.formats.base import ReplySummary
from proxy.formats.conversation import (
    DIGEST_BYTES,
    Conversation,
    Turns,
    is_unique_id,
    letters_and_digits,
)
from store.records import TRAIN, Confidence, Split
from store.tenants import DEFAULT, digest_key, tenant_of

# Least number of fingerprints, of failed attempts and of traces that are remembered. At most twice
# as many are kept, which is 17 MB at 170 bytes each.
CAPACITY: Final = 50_000
# Most failed attempts with the same body that are remembered. An SDK repeats a request within
# seconds, and many clients may send the same body at once.
MOST_ATTEMPTS: Final = 64
Key = TypeVar("Key")
Value = TypeVar("Value")
TOOL_CALL: Final = 1
RESPONSE: Final = 2
# A conversation's beginning, up to and including a reply. Any number of conversations may share a
# `PREFIX`, which has no unique id; a `UNIQUE_PREFIX` contains a unique tool call id.
PREFIX: Final = 3
UNIQUE_PREFIX: Final = 4
PREFIXES: Final = (PREFIX, UNIQUE_PREFIX)
METHODS: Final = {TOOL_CALL: "tool_call", RESPONSE: "response", UNIQUE_PREFIX: "prefix"}

# Number of replies before the newest whose prefixes are needed, too: the client may have inserted
# a reply of its own.
EARLIER_REPLIES: Final = 3
MAX_TOOL_IDS: Final = 8


class JoinedEpisode(msgspec.Struct, frozen=True):
    """The episode that a call's content points to, with method and confidence.

    `follows` is the episode that the call continues, as far as this proxy knows: see
    `CallIdentity`.
    """

    episode: str
    method: str
    confidence: Confidence
    follows: str


class Ambiguous(msgspec.Struct, frozen=True):
    """Result of `find_episode`: a call's content points to several episodes."""


class Attempt(msgspec.Struct, frozen=True):
    """A call that failed, or got no whole reply."""

    episode: str
    call_id: UUID


class _Provider(msgspec.Struct, frozen=True):
    """The episode that provided a fingerprint; `follows` is as in its `CallIdentity`."""

    episode: str
    follows: str


# Stands for several episodes that provided the same fingerprint.
_SEVERAL: Final = _Provider("", "")


class CallMemory:
    """The latest provided fingerprints, failed attempts, and traces, in bounded memory."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Begin empty, with room for at least `capacity` fingerprints, attempts and traces."""
        self._provided: RecentlyUsed[bytes, _Provider] = RecentlyUsed(capacity)
        self._failed: RecentlyUsed[bytes, deque[Attempt]] = RecentlyUsed(capacity)
        self._traces: RecentlyUsed[str, bool] = RecentlyUsed(capacity)

    def provide(self, digests: Iterable[bytes], episode: str, follows: str | None = None) -> None:
        """Remember what a call of `episode` provides; `follows` is as in its `CallIdentity`."""
        provider = _Provider(episode, follows or episode)
        for digest in digests:
            known = self._provided.get(digest)
            if known is None:
                self._provided.put(digest, provider)
            elif known.follows != provider.follows:
                self._provided.put(digest, _SEVERAL)

    def find_episode(self, needs: Iterable[bytes]) -> JoinedEpisode | Ambiguous | None:
        """Return the episode that provided `needs`, `Ambiguous` if several did, None if none did.

        The surest kind with a known fingerprint decides; its fingerprints must agree. Only the
        longest prefix is looked up: if only a shorter prefix is known here, another proxy knows
        more, and the database decides.
        """
        is_ambiguous = False
        kind = 0
        candidates: dict[str, _Provider] = {}
        for digest in needs:
            if digest[0] != kind and candidates:
                break
            kind = digest[0]
            known = None if kind == PREFIX else self._provided.get(digest)
            if known is _SEVERAL:
                is_ambiguous = True
            elif known is not None:
                candidates[known.episode] = known
            if kind in PREFIXES:
                break
        if len(candidates) == 1:
            provider = next(iter(candidates.values()))
            confidence: Confidence = "likely" if kind in PREFIXES else "certain"
            return JoinedEpisode(provider.episode, METHODS[kind], confidence, provider.follows)
        return Ambiguous() if is_ambiguous or candidates else None

    def remembers_fingerprint(self, digest: bytes) -> bool:
        """Return whether a remembered call provided this fingerprint."""
        return self._provided.get(digest) is not None

    def likely_episode(self, needs: Iterable[bytes]) -> str | None:
        """Return the episode that a call's text likely continues, or None: too weak for a join."""
        for digest in needs:
            if digest[0] in PREFIXES:
                known = self._provided.get(digest)
                return None if known is None or known is _SEVERAL else known.follows
        return None

    def begin_trace(self, episode: str) -> None:
        """Remember that this proxy got a trace's first call: its later ones join `episode` here."""
        self._traces.put(episode, True)

    def has_begun(self, episode: str) -> bool:
        """Return whether `begin_trace` was called for `episode`, and this is still remembered."""
        return self._traces.get(episode) is not None

    def remember_failed(
        self, body: bytes, episode: str, call_id: UUID, split: Split = TRAIN
    ) -> None:
        """Remember an attempt that failed or got no whole reply: its client may send it again.

        Only a repeat by the tenant of `episode` counts. Of more than `MOST_ATTEMPTS` with the same
        body, the oldest is forgotten: a call that repeats it then gets an episode of its own.
        """
        digest = _body_digest(body, split, tenant_of(episode))
        attempts = self._failed.get(digest)
        if attempts is None:
            attempts = deque(maxlen=MOST_ATTEMPTS)
            self._failed.put(digest, attempts)
        attempts.append(Attempt(episode, call_id))

    def take_attempt(
        self,
        body: bytes,
        episode: str | None = None,
        split: Split = TRAIN,
        tenant: str = DEFAULT,
    ) -> Attempt | None:
        """Return and forget the latest failed attempt with this body, or None if there is none.

        Only attempts of `split` and `tenant` count and, with `episode`, only those of that episode.
        """
        digest = _body_digest(body, split, tenant)
        attempts = self._failed.get(digest)
        if attempts is None:
            return None
        attempt = next((a for a in reversed(attempts) if episode in (None, a.episode)), None)
        if attempt is not None:
            attempts.remove(attempt)
            if not attempts:
                self._failed.forget(digest)
        return attempt


def _body_digest(body: bytes, split: Split, tenant: str) -> bytes:
    key = digest_key(tenant)
    return blake2b(body, digest_size=16, key=key, person=split.encode()).digest()


class RecentlyUsed(Generic[Key, Value]):
    """Cache of at least the `size` entries used last, and at most twice as many.

    It has two dictionaries instead of a list in order of use. When the young one is full it becomes
    the old one, and the entries of the former old one are forgotten.
    """

    def __init__(self, size: int) -> None:
        """Begin empty, with room for at least `size` entries."""
        self._size = size
        self._young: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}

    def get(self, key: Key) -> Value | None:
        """Return the value of `key` and mark it as used, or None if it is not remembered."""
        value = self._young.get(key)
        if value is None:
            value = self._old.pop(key, None)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Remember `value` for `key`, in place of any earlier value."""
        if len(self._young) >= self._size and key not in self._young:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def forget(self, key: Key) -> None:
        self._young.pop(key, None)
        self._old.pop(key, None)

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())


def needed_fingerprints(
    turns: Turns, fields: dict[str, Any], conversation: Conversation | None = None
) -> tuple[bytes, ...]:
    """Return the fingerprints by which a request's earlier calls are found, surest first.

    They are of: the tool calls whose results it contains; the response that it continues; the
    conversation up to the newest reply that a message follows, and up to each of `EARLIER_REPLIES`
    replies before; and the whole conversation, if it ends with a reply (to be continued, or
    prefilled). `conversation` is the request's, if it was read already.
    """
    history = conversation or turns.read(fields)
    needs = [_tool_call(name) for name in history.results[::-1] if is_unique_id(name)]
    del needs[MAX_TOOL_IDS:]
    previous = turns.continued_reply_id(fields)
    if previous is not None:
        needs.append(response_fingerprint(previous))
    needs += [_prefix(reply) for reply in history.replies[: -2 - EARLIER_REPLIES : -1]]
    open_reply = history.open_reply_digest()
    if open_reply is not None:
        needs.append(_prefix(open_reply))
    return tuple(dict.fromkeys(needs))


def provided_fingerprints(
    turns: Turns,
    fields: dict[str, Any],
    summary: ReplySummary,
    conversation: Conversation | None = None,
) -> tuple[bytes, ...]:
    """Return the fingerprints by which later calls find this one.

    They are of its tool calls, its response id, and the conversation with its reply.
    `conversation` is the request's, if it was read already; it is not changed.
    """
    provides = [_tool_call(call.id) for call in summary.tool_calls if is_unique_id(call.id)]
    if turns.continued_by_id and summary.response_id:
        provides.append(response_fingerprint(summary.response_id))
    if (summary.text or summary.tool_calls) and turns.shows_all(fields):
        history = conversation.copy() if conversation else turns.read(fields)
        history.add_assistant(summary.text)
        for call in summary.tool_calls:
            history.add_tool_call(call.id, call.name, call.arguments)
        reply = history.open_reply_digest()
        if reply is not None:
            provides.append(_prefix(reply))
    return tuple(dict.fromkeys(provides))


def response_fingerprint(response_id: str) -> bytes:
    """Return the fingerprint of a response id, by which calls that continue it find its call."""
    return _fingerprint(RESPONSE, response_id)


def _tool_call(tool_id: str) -> bytes:
    return _fingerprint(TOOL_CALL, letters_and_digits(tool_id))


def _fingerprint(kind: int, name: str) -> bytes:
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()
    return bytes((kind,)) + digest[1:]


def _prefix(reply: tuple[bytes, bool]) -> bytes:
    digest, unique = reply
    return bytes((UNIQUE_PREFIX if unique else PREFIX,)) + digest[1:]
