"""Treat several model servers as one: an adapter is loaded on all or on none.

While one of them is away nothing is published: requests that reach a server that does not
know the new version would fail.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trainer.publishing.server import ModelServer


class Replicas:
    """Pass each operation to all replicas of the model server, one after the other."""

    def __init__(self, base_urls: Sequence[str]) -> None:
        """Create a client for each base URL; `async with` opens them."""
        self.each = tuple(ModelServer(url) for url in base_urls)
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

    async def models(self) -> dict[str, dict[str, Any]]:
        """Return the models that every replica serves, by name, as the first one describes them.

        Raises:
            UpstreamAway: a replica does not answer.
        """
        first, *others = [await server.models() for server in self.each]
        return {
            name: model for name, model in first.items() if all(name in listed for listed in others)
        }

    async def load(self, name: str, folder: Path) -> None:
        """Load an adapter on every replica that does not serve it yet.

        Raises:
            PublishError: a replica refuses it, or serves other files under that name.
            UpstreamAway: a replica does not answer.
        """
        for server in self.each:
            await server.load(name, folder)

    async def unload(self, name: str) -> None:
        """Unload an adapter from every replica; a replica that does not know the name is skipped.

        Raises:
            PublishError: a replica refuses.
            UpstreamAway: a replica does not answer.
        """
        for server in self.each:
            await server.unload(name)
