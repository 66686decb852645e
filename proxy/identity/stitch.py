"""Find the episode of a call without a name, from what the call repeats (pure, bounded memory).

The fingerprints that each call provides are remembered with its episode. A call that needs one
joins that episode, if only one call can have provided it. If two episodes did, the call is in doubt
and joins none: a join is never guessed (docs/decisions/008-stitching.md). Mere words may occur in
many conversations, also at other proxies: they join nothing here, and the ledger decides. A request
that an SDK sends again after a failure joins the attempt that failed.
"""

from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final
from uuid import UUID

import msgspec

from proxy.identity.fingerprints import METHODS, PREFIX, PREFIXES
from proxy.identity.generations import Generations
from store.records import TRAIN, Confidence, Split

# Remembered fingerprints, and as many failed attempts. Each takes 170 bytes: 17 MB at most.
CAPACITY: Final = 50_000
# Remembered failed attempts with the same body. An SDK sends again within seconds, and many
# clients may send the same body at once.
MOST_ATTEMPTS: Final = 64


class Joined(msgspec.Struct, frozen=True):
    """Name the episode that a call's content points to, by which fingerprint, and how surely.

    `follows` is the episode that the call continues, as far as this proxy can see: see `Identity`.
    """

    episode: str
    method: str
    confidence: Confidence
    follows: str


class Doubt(msgspec.Struct, frozen=True):
    """Report that a call's content points to several episodes."""


class Attempt(msgspec.Struct, frozen=True):
    """Remember a call that ended without a reply."""

    episode: str
    call_id: UUID


class _Provider(msgspec.Struct, frozen=True):
    """Name the episode that provided a fingerprint."""

    episode: str
    follows: str


_SEVERAL: Final = _Provider("", "")


class CallMemory:
    """Remember the fingerprints that calls provided, and attempts that failed."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Begin empty, with room for at least `capacity` fingerprints and as many attempts."""
        self._provided: Generations[bytes, _Provider] = Generations(capacity)
        self._failed: Generations[bytes, deque[Attempt]] = Generations(capacity)

    def provide(self, digests: Iterable[bytes], episode: str, follows: str | None = None) -> None:
        """Remember what a call of `episode` provides; `follows` is as in its `Identity`."""
        provider = _Provider(episode, follows or episode)
        for digest in digests:
            known = self._provided.get(digest)
            if known is None:
                self._provided.put(digest, provider)
            elif known.follows != provider.follows:
                self._provided.put(digest, _SEVERAL)

    def find(self, needs: Iterable[bytes]) -> Joined | Doubt | None:
        """Return the episode that provided what is needed, doubt if several did, or None.

        Fingerprints of one kind must agree, and a surer kind decides before the others. Of prefixes
        only the longest is looked up: if a shorter one is known here and the longest is not,
        another proxy knows more. The ledger, which knows all, then decides.
        """
        doubt = False
        kind = 0
        candidates: dict[str, _Provider] = {}
        for digest in needs:
            if digest[0] != kind and candidates:
                break
            kind = digest[0]
            known = None if kind == PREFIX else self._provided.get(digest)
            if known is _SEVERAL:
                doubt = True
            elif known is not None:
                candidates[known.episode] = known
            if kind in PREFIXES:
                break
        if len(candidates) == 1:
            provider = next(iter(candidates.values()))
            confidence: Confidence = "likely" if kind in PREFIXES else "certain"
            return Joined(provider.episode, METHODS[kind], confidence, provider.follows)
        return Doubt() if doubt or candidates else None

    def followed(self, needs: Iterable[bytes]) -> str | None:
        """Return the episode that a call most likely continues by its words: a hint, not a join."""
        for digest in needs:
            if digest[0] in PREFIXES:
                known = self._provided.get(digest)
                return None if known is None or known is _SEVERAL else known.follows
        return None

    def failed(self, body: bytes, episode: str, call_id: UUID, split: Split = TRAIN) -> None:
        """Remember an attempt that ended without a reply: its client may send this body again.

        Past `MOST_ATTEMPTS` the oldest one is forgotten: a call that repeats it then counts as a
        new one, with an episode of its own.
        """
        digest = _body_digest(body, split)
        attempts = self._failed.get(digest)
        if attempts is None:
            attempts = deque(maxlen=MOST_ATTEMPTS)
            self._failed.put(digest, attempts)
        attempts.append(Attempt(episode, call_id))

    def retried(
        self, body: bytes, episode: str | None = None, split: Split = TRAIN
    ) -> Attempt | None:
        """Return and forget the latest failed attempt that this body repeats, or None.

        Only attempts of `split` count and, with `episode`, only those of that episode.
        """
        digest = _body_digest(body, split)
        attempts = self._failed.get(digest)
        if attempts is None:
            return None
        attempt = next((a for a in reversed(attempts) if episode in (None, a.episode)), None)
        if attempt is not None:
            attempts.remove(attempt)
            if not attempts:
                self._failed.forget(digest)
        return attempt


def _body_digest(body: bytes, split: Split) -> bytes:
    return blake2b(body, digest_size=16, person=split.encode()).digest()
