"""Several model servers that serve the same: what one is to hold, all are to hold.

While one of them is away nothing is published: a version that some do not know would fail
the requests that reach them.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trainer.server import ModelServer


class Replicas:
    """All replicas of the model server, one after another."""

    def __init__(self, base_urls: Sequence[str]) -> None:
        self.each = tuple(ModelServer(url) for url in base_urls)
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for server in self.each:
            await self._open.enter_async_context(server)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._open.aclose()

    async def models(self) -> dict[str, dict[str, Any]]:
        """What all of them serve, by name; see `ModelServer.models`.

        Raises:
            UpstreamAway: one does not answer.
        """
        first, *others = [await server.models() for server in self.each]
        return {
            name: model for name, model in first.items() if all(name in listed for listed in others)
        }

    async def load(self, name: str, folder: Path) -> None:
        """Make an adapter servable everywhere; where it is already it is left alone.

        Raises:
            PublishError: one refuses it, or serves other bytes under that name.
        """
        for server in self.each:
            await server.load(name, folder)

    async def unload(self, name: str) -> None:
        """Take a name away everywhere; where it is not there is fine."""
        for server in self.each:
            await server.unload(name)
