"""Look at the ledger while a scenario runs: figures that may be late, never wrong."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pawl.scenarios.counting import VersionRewards, curves_of, is_trained, serving_version
from pawl.scenarios.progress import Progress
from store.claims import list_updates
from store.database import is_unavailable, make_engine
from store.read.evaluations import evaluations, rewards_of_work
from store.read.stats import PolicyTotals, policy_totals, stored_responses, totals
from store.records import UpdateRow
from store.version_queries import list_versions
from store.versions import PolicyVersion

Found = TypeVar("Found")


class Ledger:
    """The ledger of a running stack; `policies` are those that are trained."""

    def __init__(self, database_url: str, policies: Sequence[str], progress: Progress) -> None:
        """Store whose figures are kept in `progress`."""
        self._engine: AsyncEngine = make_engine(database_url)
        self._policies = policies
        self._progress = progress
        self._updates: list[UpdateRow] = []
        self._versions: list[PolicyVersion] = []

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    async def look(self) -> None:
        """Refresh the figures; while the database does not answer they stay as they are."""
        self._updates = await self._ask(list_updates) or self._updates
        self._versions = await self._ask(list_versions) or self._versions
        progress = self._progress
        progress.updates = [update for update in self._updates if update.state == "done"]
        progress.serving = serving_version(self._versions, progress.policy)
        progress.totals = await self._ask(totals) or progress.totals

    def trained(self, number: int) -> bool:
        """Return whether a wave's number of updates is done (`is_trained`)."""
        leading = self._progress.policy
        return is_trained(self._updates, self._versions, self._policies, leading, number)

    async def calls(self) -> int | None:
        """Return how many calls are stored; None: the database does not answer."""
        counted = await self._ask(totals)
        return None if counted is None else counted.calls

    async def stored(self, replies: Sequence[str]) -> int | None:
        """Return how many of these replies, by their ids, are stored; None: it does not answer."""
        return await self._ask(lambda connection: stored_responses(connection, replies))

    async def by_policy(self) -> list[PolicyTotals] | None:
        """Return what is stored of each policy; None: the database does not answer."""
        return await self._ask(policy_totals)

    async def curves(self) -> dict[str, list[VersionRewards]] | None:
        """Return each trained policy's rewards by version; None: the database does not answer."""
        worked, asked = await self._ask(rewards_of_work), await self._ask(evaluations)
        if worked is None or asked is None:
            return None
        return curves_of(self._policies, worked, asked)

    async def _ask(self, query: Callable[[AsyncConnection], Awaitable[Found]]) -> Found | None:
        try:
            async with self._engine.connect() as connection:
                return await query(connection)
        except Exception as error:
            if not is_unavailable(error):
                raise
            # PostgreSQL is being restarted: the next look shows the figures.
            return None
