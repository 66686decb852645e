"""Accept one body for each idempotency key: in this worker, on this machine, at other proxies.

The key is taken first in this worker's memory, before anything is awaited; then on this machine, by
a symbolic link to the body's hash; then in PostgreSQL, if that answers in time. Another body under
the same key is refused if any of the three knows the key. A repeat of the same body gets the same
answer. It is recorded again unless it is known to be durable; the ledger then counts it once.
"""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
import structlog

from proxy.errors import KeyReused, SpoolFull
from proxy.lookup import Lookup
from store.tenants import bare
from store.write.feedback_keys import KeyState, give_key_back, take_key

log = structlog.get_logger()

FOLDER: Final = "keys"
# Clients repeat within minutes; APIs with idempotency keys commonly promise a day.
KEEP_S: Final = 86_400.0
# Most keys that are kept, the newest first: each link takes an inode.
MOST: Final = 200_000


class KeyFiles:
    """Keep the key links under one spool directory."""

    def __init__(self, spool_dir: Path) -> None:
        """Use the folder `keys` of `spool_dir`; it is created with the first key."""
        self._folder = spool_dir / FOLDER

    def take(self, key: str, body_hash: str) -> str | None:
        """Take a key for a body; return the hash it is already taken for, or None if it was free.

        If the disk fails, that is logged and the key counts as free: the ledger recognises
        repeats by itself.
        """
        path = self._path(key)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            os.symlink(body_hash, path)
        except FileExistsError:
            with suppress(OSError):
                return os.readlink(path)
        except OSError as error:
            log.error("idempotency_key_not_kept", reason=str(error))
        return None

    def give_back(self, key: str) -> None:
        """Free a key whose body could not be recorded; a disk that fails is logged."""
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            log.error("idempotency_key_not_freed", reason=str(error))

    def clean(self, now: float | None = None) -> int:
        """Delete keys older than a day, and the oldest beyond `MOST`; return how many.

        `now` is Unix time in seconds, by default the present.
        """
        links: list[tuple[float, str]] = []
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                # Another process may delete keys at the same time.
                with suppress(FileNotFoundError):
                    links.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
        links.sort(reverse=True)
        oldest = (time.time() if now is None else now) - KEEP_S
        old = [path for number, (at, path) in enumerate(links) if number >= MOST or at < oldest]
        for path in old:
            with suppress(FileNotFoundError):
                os.unlink(path)
        return len(old)

    def _path(self, key: str) -> Path:
        return self._folder / sha256(key.encode()).hexdigest()


# Keys that a worker remembers.
REMEMBERED: Final = 20_000
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


class IdempotencyStore:
    """Check one worker's keys against its memory, the machine's files and the database."""

    def __init__(self, files: KeyFiles, lookup: Lookup) -> None:
        """Begin with no key in memory; further keys are looked up in `files` and by `lookup`."""
        self._files = files
        # The hash of the body that each key was last used for, of the newest keys.
        self._body_hashes: OrderedDict[str, str] = OrderedDict()
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
        self._body_hashes[key] = body_hash
        if len(self._body_hashes) > REMEMBERED:
            self._body_hashes.popitem(last=False)
        return answer

    def _is_durable_here(self, key: str, body_hash: str) -> bool:
        earlier = self._body_hashes.get(key)
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
