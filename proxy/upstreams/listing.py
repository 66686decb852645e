"""Look up what a replica lists as served, once for all calls that ask meanwhile."""

import asyncio
from collections.abc import Collection
from typing import Final

import msgspec
import structlog

from proxy.formats.raw_json import UNREADABLE
from proxy.http.client import NoReply, NotSent, Pool, Torn, ask_bodyless
from proxy.http.wire import Headers
from proxy.upstreams.keys import CREDENTIALS

log = structlog.get_logger()

# How long a replica may take to say which models it has, to a call that waits for one.
LOOK_S: Final = 2.0
# What was seen so short a time ago is taken to be so still: no server restarts within it.
SHARED_S: Final = 0.1
NO_LIST: Final = (NotSent, NoReply, Torn, TimeoutError, *UNREADABLE)


class Listing:
    """Keep the names that one replica lists, a moment old at most."""

    def __init__(self, pool: Pool, target: str) -> None:
        """Store where the list is: the connections to the replica, and the path."""
        self._pool = pool
        self._target = target
        self._names: Collection[str] = ()
        self._begun = float("-inf")
        self._looking = asyncio.Lock()

    async def has(self, name: str, headers: Headers) -> bool:
        """Return whether the replica lists `name` now; one that does not answer lists nothing.

        `headers` are those of the call, of which the credentials are shown.
        """
        clock = asyncio.get_running_loop().time
        asked = clock()
        async with self._looking:
            # A look that another call began after this one asked is as good: a call waits for two
            # looks at most, however many wait with it.
            if asked - self._begun > SHARED_S:
                begun = clock()
                self._names = await self._look(headers)
                self._begun = begun
            return name in self._names

    async def _look(self, headers: Headers) -> Collection[str]:
        shown = [pair for pair in headers if pair[0].lower() in CREDENTIALS]
        try:
            async with asyncio.timeout(LOOK_S):
                reply = await ask_bodyless(self._pool, "GET", self._target, shown)
                try:
                    body = await reply.read() or b""
                finally:
                    reply.close()
            return {model.id for model in msgspec.json.decode(body, type=_Models).data}
        except NO_LIST as error:
            log.info("names_unknown", replica=self._pool.authority, reason=type(error).__name__)
            return ()


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]
