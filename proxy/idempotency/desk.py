"""Lets one body through under each key: in this worker, on this machine, at other proxies.

Before anything is awaited the key is taken in this worker's memory; then on this machine (see
`key_files`) and in PostgreSQL, where that answers in time. Another body under the same key is
refused wherever one of them knows. A repeat of the same body is answered like the first; only
where it is known to be durable it is not recorded again, and else the ledger counts it once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from proxy.errors import KeyReused, SpoolFull
from proxy.idempotency.key_files import KeyFiles
from proxy.lookup import Lookup
from proxy.recent import Recent
from store.keys import KeyState, give_key_back, take_key
from store.records import FeedbackRecord

# Feedback never waits long for a database that is slow or away: it is durable without it.
LOOK_UP_S: Final = 0.25


class Answer(msgspec.Struct, frozen=True):
    """What a client is told."""

    status: int
    body: bytes


# Answers a record; told whether it is known to be durable already.
State = Callable[[FeedbackRecord, bool], Awaitable[Answer]]


class _Running(msgspec.Struct):
    """A body that is being taken; `outcome` is its answer, or None where it was not taken."""

    body_hash: str
    outcome: "asyncio.Future[Answer | None]"


class KeyDesk:
    """One worker's view of the keys."""

    def __init__(self, files: KeyFiles, recent: Recent, lookup: Lookup) -> None:
        self._files = files
        self._recent = recent
        self._lookup = lookup
        self._running: dict[str, _Running] = {}

    async def once(self, record: FeedbackRecord, state: State) -> Answer:
        """The answer to a record, which `state` gives; its repeats have the same.

        Raises:
            KeyReused: its key was used for another body.
            SpoolFull: see `state`; the key is free again.
        """
        key, body_hash = record.idempotency_key, record.body_hash
        if key is None or body_hash is None:
            return await state(record, False)
        while (running := self._running.get(key)) is not None:
            # Who stops waiting must not take the first one's outcome away from the others.
            answer = await asyncio.shield(running.outcome)
            if answer is not None and running.body_hash != body_hash:
                raise _reused(key)
            if answer is not None:
                return answer
        outcome = asyncio.get_running_loop().create_future()
        self._running[key] = _Running(body_hash, outcome)
        answer = None
        try:
            answer = await self._first(key, body_hash, record, state)
        finally:
            del self._running[key]
            outcome.set_result(answer)
        return answer

    async def _first(
        self, key: str, body_hash: str, record: FeedbackRecord, state: State
    ) -> Answer:
        if self._is_durable_here(key, body_hash):
            return await state(record, True)
        taken = await asyncio.to_thread(self._files.take, key, body_hash)
        if taken is not None and taken != body_hash:
            raise _reused(key)
        told = await self._lookup.ask(
            lambda connection: take_key(connection, key, body_hash), within_s=LOOK_UP_S
        )
        if told is KeyState.ANOTHERS:
            if taken is None:
                await asyncio.to_thread(self._files.give_back, key)
            raise _reused(key)
        try:
            answer = await state(record, told is KeyState.STORED)
        except SpoolFull:
            # Nothing was taken: the key may come back with whatever the client then states.
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
        f"Idempotency-Key {key!r} was used for another body; use a new key for a new one",
        param="Idempotency-Key",
    )
