"""Which episode a call without a name belongs to, from what it repeats (pure, bounded memory).

What a call offers is remembered with its episode; a call that asks for it joins that episode,
if the offer is one that can be made but once. An offer that two episodes made joins nothing:
such a call is in doubt, and a doubtful join is never guessed (DESIGN §4). Words may be said
in many conversations, at other proxies too: they join nothing here, but leave the ledger to
see whose they are. A request that an SDK sends again after it failed joins the attempt that
failed.
"""

from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final
from uuid import UUID

import msgspec

from proxy.identity.generations import Generations
from proxy.identity.signs import METHODS, PREFIX, PREFIXES
from store.records import Confidence

# Of offers, and of failed attempts. An offer takes 170 bytes: 17 MB at most.
CAPACITY: Final = 50_000
# Of the failed attempts with one body: an SDK asks again within seconds, and many may ask at once.
MOST_ATTEMPTS: Final = 64


class Joined(msgspec.Struct, frozen=True):
    """The episode that a call's content points to, by which sign, and how surely.

    `follows` is what it goes on from as far as this proxy can see: see `Identity`.
    """

    episode: str
    method: str
    confidence: Confidence
    follows: str


class Doubt(msgspec.Struct, frozen=True):
    """A call's content points to several episodes."""


class Attempt(msgspec.Struct, frozen=True):
    """A call that came to no reply."""

    episode: str
    call_id: UUID


class _Made(msgspec.Struct, frozen=True):
    """By whom an offer was made."""

    episode: str
    follows: str


_SEVERAL: Final = _Made("", "")


class Stitches:
    """What replies offered, and which attempts failed."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._offers: Generations[bytes, _Made] = Generations(capacity)
        self._failed: Generations[bytes, deque[Attempt]] = Generations(capacity)

    def offer(self, digests: Iterable[bytes], episode: str, follows: str | None = None) -> None:
        """A call of `episode` made these offers; `follows` as `identify` found it."""
        made = _Made(episode, follows or episode)
        for digest in digests:
            known = self._offers.get(digest)
            if known is None:
                self._offers.put(digest, made)
            elif known.follows != made.follows:
                self._offers.put(digest, _SEVERAL)

    def find(self, asks: Iterable[bytes]) -> Joined | Doubt | None:
        """The episode that made the offers asked for; doubt if several did.

        Signs of one kind must agree, and a surer kind decides before the others. Of prefixes
        only the longest is looked at: that a shorter one is known here, and the longest is
        not, says that another proxy knows more. The ledger, which knows all, goes on from there.
        """
        doubt = False
        kind, found = 0, dict[str, _Made]()
        for digest in asks:
            if digest[0] != kind and found:
                break
            kind = digest[0]
            known = None if kind == PREFIX else self._offers.get(digest)
            if known is _SEVERAL:
                doubt = True
            elif known is not None:
                found[known.episode] = known
            if kind in PREFIXES:
                break
        if len(found) == 1:
            made = next(iter(found.values()))
            confidence: Confidence = "likely" if kind in PREFIXES else "certain"
            return Joined(made.episode, METHODS[kind], confidence, made.follows)
        return Doubt() if doubt or found else None

    def followed(self, asks: Iterable[bytes]) -> str | None:
        """What a call most likely goes on from by its words; no join, only a hint."""
        for digest in asks:
            if digest[0] in PREFIXES:
                known = self._offers.get(digest)
                return None if known is None or known is _SEVERAL else known.follows
        return None

    def failed(self, body: bytes, episode: str, call_id: UUID) -> None:
        """An attempt with this body came to no reply; its client may send it again.

        Past `MOST_ATTEMPTS` the oldest is forgotten: a call that repeats it then counts as a
        new one, with an episode of its own.
        """
        digest = blake2b(body, digest_size=16).digest()
        attempts = self._failed.get(digest)
        if attempts is None:
            attempts = deque(maxlen=MOST_ATTEMPTS)
            self._failed.put(digest, attempts)
        attempts.append(Attempt(episode, call_id))

    def retried(self, body: bytes, episode: str | None = None) -> Attempt | None:
        """The failed attempt that this body repeats, the latest first; each is repeated once.

        With `episode`, one of that episode's attempts.
        """
        digest = blake2b(body, digest_size=16).digest()
        attempts = self._failed.get(digest)
        if attempts is None:
            return None
        found = next((a for a in reversed(attempts) if episode in (None, a.episode)), None)
        if found is not None:
            attempts.remove(found)
            if not attempts:
                self._failed.forget(digest)
        return found
