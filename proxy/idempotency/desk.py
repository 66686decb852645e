"""Accept one body for each idempotency key: in this worker, on this machine, at other proxies.

The key is taken first in this worker's memory, before anything is awaited; then on this machine
(`key_files`); then in PostgreSQL, if that answers in time. Another body under the same key is
refused if any of the three knows the key. A repeat of the same body gets the same answer. It is
recorded again unless it is known to be durable; the ledger then counts it once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from proxy.calls.recent import Recent
from proxy.errors import KeyReused, SpoolFull
from proxy.idempotency.key_files import KeyFiles
from proxy.policies.lookup import Lookup
from store.tenants import bare
from store.write.feedback_keys import KeyState, give_key_back, take_key

# Feedback is durable without the database, so it waits only briefly for one that is slow or away.
LOOK_UP_S: Final = 0.25


class Answer(msgspec.Struct, frozen=True):
    """Reply to a client with an HTTP status and a JSON body."""

    status: int
    body: bytes


# Takes a body, of which it is told whether it is known to be durable already; returns the answer.
State = Callable[[bool], Awaitable[Answer]]


class _Running(msgspec.Struct):
    """Note a body that is being taken; `outcome` is its answer, or None if taking it failed."""

    body_hash: str
    outcome: "asyncio.Future[Answer | None]"


class KeyDesk:
    """Check one worker's keys against its memory, the machine's files and the database."""

    def __init__(self, files: KeyFiles, recent: Recent, lookup: Lookup) -> None:
        """Store the three places where keys are looked up."""
        self._files = files
        self._recent = recent
        self._lookup = lookup
        self._running: dict[str, _Running] = {}

    async def once(self, key: str, body_hash: str, state: State) -> Answer:
        """Return the answer that `state` gives for a body; repeats get the same answer.

        Args:
            key: the idempotency key that the body was sent under, as it is kept.
            body_hash: the body's hash.
            state: takes the body.

        Raises:
            KeyReused: the key was used for another body.
            SpoolFull: `state` could not make the body durable; the key is free again.
        """
        while (running := self._running.get(key)) is not None:
            # Shielded: one request that is cancelled must not cancel the outcome for the others.
            answer = await asyncio.shield(running.outcome)
            if answer is not None and running.body_hash != body_hash:
                raise _reused(key)
            if answer is not None:
                return answer
        outcome = asyncio.get_running_loop().create_future()
        self._running[key] = _Running(body_hash, outcome)
        answer = None
        try:
            answer = await self._first(key, body_hash, state)
        finally:
            del self._running[key]
            outcome.set_result(answer)
        return answer

    async def _first(self, key: str, body_hash: str, state: State) -> Answer:
        if self._is_durable_here(key, body_hash):
            return await state(True)
        taken = await asyncio.to_thread(self._files.take, key, body_hash)
        if taken is not None and taken != body_hash:
            raise _reused(key)
        key_state = await self._lookup.ask(
            lambda connection: take_key(connection, key, body_hash), within_s=LOOK_UP_S
        )
        if key_state is KeyState.ANOTHERS:
            if taken is None:
                await asyncio.to_thread(self._files.give_back, key)
            raise _reused(key)
        try:
            answer = await state(key_state is KeyState.STORED)
        except SpoolFull:
            # Nothing was recorded, so the client may use the key again, for any body.
            if taken is None:
                await self._give_back(key, body_hash)
            raise
        self._recent.remember_key(key, body_hash)
        return answer

    def _is_durable_here(self, key: str, body_hash: str) -> bool:
        earlier = self._recent.body_hash_of(key)
        if earlier is not None and earlier != body_hash:
            raise _reused(key)
        return earlier is not None

    async def _give_back(self, key: str, body_hash: str) -> None:
        await asyncio.to_thread(self._files.give_back, key)
        await self._lookup.ask(
            lambda connection: give_key_back(connection, key, body_hash), within_s=LOOK_UP_S
        )


def _reused(key: str) -> KeyReused:
    return KeyReused(
        f"Idempotency-Key {bare(key)!r} was already used for another body. "
        "Use a new key for each body",
        param="Idempotency-Key",
    )
