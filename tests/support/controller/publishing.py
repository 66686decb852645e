"""Let a controller publish what trainers of this process write."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncEngine

from controller.publishing import Publishing
from controller.run import look_forever, working
from tests.support.controller.replicas import POLL_S
from tests.support.controller.trials import settings_of
from trainer.loop import Loop
from trainer.publishing.model_server import Replicas


class PublishedLoop(Loop):
    """A loop beside a new controller, which looks once after each update."""

    async def look(self) -> None:
        """Let a controller look once, and the loop take note of it."""
        await self.is_published()
        await Publishing(self._servers).look(self._engine)
        await self.is_published()

    async def recover(self) -> None:
        await super().recover()
        await self.look()

    async def update_once(self, *, looks_ahead: bool = False) -> bool:
        updated = await super().update_once(looks_ahead=looks_ahead)
        await self.look()
        return updated


@asynccontextmanager
async def publishing_beside(engine: AsyncEngine, urls: Sequence[str]) -> AsyncIterator[None]:
    """Let a controller of these replicas publish for as long as the block runs."""
    async with Replicas(urls) as servers:
        look = look_forever(settings_of(engine), POLL_S, "publishing", Publishing(servers).look)
        async with working([look]):
            yield
