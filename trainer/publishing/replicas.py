"""Treat several model servers as one: an operation goes to all that answer, at the same time.

A replica that is away stops nothing. What it lacks when it is back is loaded then, by the steward
(`pawl steward`) or at the trainer's next look; until then the proxy asks the others
(docs/decisions/048-steward.md).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog

from trainer.errors import UpstreamAway
from trainer.publishing.server import ModelServer

log = structlog.get_logger()

T = TypeVar("T")
Answers = dict[ModelServer, T]


class Replicas:
    """Pass each operation to all replicas of the model server that answer.

    Attributes:
        each: the replicas.
        slots: the adapter slots of each, as configured; None: as they say.
        returns: how often one answered that had been away: it may be another one since.
    """

    def __init__(self, base_urls: Sequence[str], slots: int | None = None) -> None:
        """Create a client for each base URL; `async with` opens them."""
        self.slots = slots
        self.each = tuple(ModelServer(url) for url in base_urls)
        self._away: set[ModelServer] = set()
        self.returns = 0
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Open a connection pool for each replica."""
        for server in self.each:
            await self._open.enter_async_context(server)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all connection pools."""
        await self._open.aclose()

    async def ask(
        self,
        what: Callable[[ModelServer], Awaitable[T]],
        servers: Iterable[ModelServer] | None = None,
    ) -> Answers[T]:
        """Do `what` with each of `servers` (None: all) at once; return what those gave that answer.

        Every one has ended when this returns.

        Raises:
            UpstreamAway: none of them answers.
            PublishError: one that answers refuses.
        """
        asked = self.each if servers is None else tuple(servers)
        ended = await asyncio.gather(*(_settled(what(server)) for server in asked))
        answers: Answers[T] = {}
        away: list[UpstreamAway] = []
        for server, result in zip(asked, ended, strict=True):
            if isinstance(result, UpstreamAway):
                self._note_away(server, result)
                away.append(result)
            elif isinstance(result, Exception):
                raise result
            else:
                if server in self._away:
                    self._away.remove(server)
                    self.returns += 1
                [answers[server]] = result
        if not answers:
            raise away[0]
        return answers

    def _note_away(self, server: ModelServer, error: UpstreamAway) -> None:
        """Log that a replica is away, once for as long as it stays away."""
        if server not in self._away:
            log.warning("replica_away", replica=server.url, reason=str(error))
        self._away.add(server)

    async def models(self) -> dict[str, dict[str, Any]]:
        """Return the models that every replica which answers serves, by name.

        They are described as the first of them describes them.

        Raises:
            UpstreamAway: no replica answers.
        """
        first, *others = (await self.ask(ModelServer.models)).values()
        return {
            name: model for name, model in first.items() if all(name in listed for listed in others)
        }

    async def load(self, name: str, folder: Path) -> tuple[ModelServer, ...]:
        """Load an adapter on every replica that answers and lacks it; return those that have it.

        Raises:
            PublishError: a replica refuses it, or serves other files under that name.
            UpstreamAway: no replica answers.
        """
        return tuple(await self.ask(lambda server: server.load(name, folder)))

    async def unload(self, name: str) -> None:
        """Unload an adapter from every replica that answers; an unknown name is no error.

        Raises:
            PublishError: a replica refuses.
            UpstreamAway: no replica answers.
        """
        await self.ask(lambda server: server.unload(name))


async def _settled(work: Awaitable[T]) -> list[T] | Exception:
    """Return the result of `work`, in a list, or the exception that it ended with."""
    try:
        return [await work]
    except Exception as error:
        return error
