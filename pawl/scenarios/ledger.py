"""Read the ledger while a scenario runs, and count its calls at the end."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import aiohttp
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pawl.scenarios.progress import Progress
from store.claims import list_updates
from store.database import is_unavailable, make_engine
from store.policy_table import PolicySpec
from store.read.evaluations import Evaluation, rewards_by_version
from store.read.stats import PolicyTotals, policy_totals
from store.records import TRAIN, Record, UpdateRow
from store.version_queries import list_versions
from store.versions import PolicyVersion

CALLS: Final = re.compile(r"^pawl_calls_total\{[^}]*\} (\S+)$", re.MULTILINE)
POLL_S: Final = 0.5
STORED_S: Final = 30.0
Result = TypeVar("Result")


class VersionRewards(Record, frozen=True, kw_only=True):
    """Mean reward and number of episodes of a version, at work and on held-out tasks.

    An episode with several versions of a policy counts for the first. Policies that share an
    episode share its reward.
    """

    version: int
    reward: float | None = None
    episodes: int = 0
    held_out: float | None = None
    held_out_episodes: int = 0


class Ledger:
    """Reads the ledger of a running stack; `policies` are the trained ones."""

    def __init__(self, database_url: str, policies: Sequence[str], progress: Progress) -> None:
        self._engine: AsyncEngine = make_engine(database_url)
        self._policies = policies
        self._progress = progress
        self._updates: list[UpdateRow] = []
        self._versions: list[PolicyVersion] = []

    async def close(self) -> None:
        await self._engine.dispose()

    async def refresh(self) -> None:
        """Read the figures of `progress` again; without an answer of the database they stay."""
        self._updates = await self._query(list_updates) or self._updates
        self._versions = await self._query(list_versions) or self._versions
        progress = self._progress
        progress.updates = [update for update in self._updates if update.state == "done"]
        progress.serving = serving_version(self._versions, progress.policy)
        progress.totals = await self._query(policy_totals) or progress.totals

    def has_trained(self, number: int) -> bool:
        """Return whether `number` updates are done (`is_trained`)."""
        leading = self._progress.policy
        return is_trained(self._updates, self._versions, self._policies, leading, number)

    async def curves(self) -> dict[str, list[VersionRewards]] | None:
        """Return each trained policy's rewards by version; None if the database is away."""
        work = partial(rewards_by_version, split=TRAIN)
        at_work, held_out = await self._query(work), await self._query(rewards_by_version)
        if at_work is None or held_out is None:
            return None
        return curves_of(self._policies, at_work, held_out)

    async def served_since(self, version: int) -> float | None:
        """Return the leading policy's mean reward at work by this version and later ones."""
        curve = (await self.curves() or {}).get(self._progress.policy, [])
        work = [one for one in curve if one.version >= version and one.reward is not None]
        episodes = sum(one.episodes for one in work)
        return sum((one.reward or 0.0) * one.episodes for one in work) / episodes if work else None

    async def calls(self, metrics_url: str, specs: Sequence[PolicySpec]) -> dict[str, Any] | None:
        """Return figures of all calls and of each policy, or None if the database is away.

        First wait, for at most `STORED_S`, until the calls that the proxy counts at `metrics_url`
        are stored.
        """
        async with aiohttp.ClientSession() as session, session.get(metrics_url) as reply:
            calls = int(sum(map(float, CALLS.findall(await reply.text()))))
        deadline = asyncio.get_running_loop().time() + STORED_S
        while True:
            by_policy = await self._query(policy_totals)
            stored = sum(one.calls for one in by_policy or ())
            if stored >= calls or asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(POLL_S)
        if by_policy is None:
            return None
        return {
            "calls": calls,
            "recorded": stored,
            "trainable_share": trainable_share(specs, by_policy),
            "failed_requests": sum(one.failed_calls for one in by_policy),
            "policies": policy_facts(specs, by_policy),
        }

    async def _query(self, query: Callable[[AsyncConnection], Awaitable[Result]]) -> Result | None:
        try:
            async with self._engine.connect() as connection:
                return await query(connection)
        except Exception as error:
            if not is_unavailable(error):
                raise
            # PostgreSQL is restarting: the next query refreshes the figures.
            return None


def serving_version(versions: Sequence[PolicyVersion], policy: str) -> int:
    """Return a policy's serving version; 0 is the base model."""
    serving = [one for one in versions if one.name == policy and one.state == "serving"]
    return max((one.version for one in serving), default=0)


def is_trained(
    updates: Sequence[UpdateRow],
    versions: Sequence[PolicyVersion],
    policies: Sequence[str],
    leading: str,
    number: int,
) -> bool:
    """Return whether `number` updates are done, none runs, and the newest versions serve.

    Only updates of the leading policy count, as the others may learn less from a wave.
    """
    done = [update for update in updates if update.state == "done"]
    newest = {
        name: max((one.version or 0 for one in done if one.policy == name), default=0)
        for name in policies
    }
    return (
        sum(update.policy == leading for update in done) >= number
        and not any(update.state == "running" for update in updates)
        and all(serving_version(versions, name) >= newest[name] for name in policies)
    )


def curves_of(
    policies: Sequence[str], at_work: Sequence[Evaluation], held_out: Sequence[Evaluation]
) -> dict[str, list[VersionRewards]]:
    """Return each policy's rewards by version, at work and on held-out tasks."""
    work_points = {(one.policy, one.version): one for one in at_work}
    held_out_points = {(one.policy, one.version): one for one in held_out}

    def mean(point: Evaluation | None) -> float | None:
        return None if point is None or point.mean is None else round(point.mean, 4)

    curves: dict[str, list[VersionRewards]] = {policy: [] for policy in policies}
    for key in sorted({*work_points, *held_out_points}):
        policy, version = key
        if policy in curves:
            worked, asked = work_points.get(key), held_out_points.get(key)
            curves[policy].append(
                VersionRewards(
                    version=version,
                    reward=mean(worked),
                    episodes=worked.scored if worked else 0,
                    held_out=mean(asked),
                    held_out_episodes=asked.scored if asked else 0,
                )
            )
    return curves


def policy_facts(
    specs: Sequence[PolicySpec], totals: Sequence[PolicyTotals]
) -> dict[str, dict[str, Any]]:
    """Return for each policy whether it is trained, and how many versions and trained episodes."""
    by_name = {one.policy: one for one in totals}
    return {
        spec.name: {
            "trained": spec.trained,
            "versions": one.versions if (one := by_name.get(spec.name)) else 0,
            "trained_episodes": one.trained_episodes if one else 0,
        }
        for spec in specs
    }


def trainable_share(specs: Sequence[PolicySpec], totals: Sequence[PolicyTotals]) -> float | None:
    """Return the share of the trained policies' calls that can be trained; None without calls.

    Side calls are left out: they are never trained.
    """
    trained = {spec.name for spec in specs if spec.trained}
    trained_totals = [one for one in totals if one.policy in trained]
    calls = sum(one.calls - one.side_calls for one in trained_totals)
    return round(sum(one.trainable_calls for one in trained_totals) / calls, 4) if calls else None
