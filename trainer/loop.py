"""The update loop on one page: claim, credit, train, write, consume, publish, and recover.

Each episode is trained exactly once (docs/decisions/004-once.md and 024-exactly-once.md). A
claim lives in the database; a version exists from the moment its folder is renamed into
place; its episodes are consumed in the transaction that records it. After a kill, a running
update whose folder exists is recorded from its manifest; one without a folder is abandoned,
and its episodes are free again.

An update depends on no clock, no generated id and no chance: the same claim gives the same
version, bit by bit, however often it is begun.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final, TypeVar
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store.connection.availability import is_unavailable
from store.errors import ClaimLost
from store.records import PolicyVersion
from store.updates import claims, policies
from store.updates.claims import Claim, Outcome
from trainer.batches.rows import Row
from trainer.batches.schedule import has_ended
from trainer.claiming import Claiming
from trainer.errors import AdapterError, LearnerError, PublishError, Unusable
from trainer.expiring import Expiring
from trainer.learning import LearnerProtocol
from trainer.metrics import EPISODES, TRAINED_TOKENS, UPDATE, UPDATE_SECONDS, UPDATES, VERSION
from trainer.publishing import adapters
from trainer.publishing.probe import ProbeRow
from trainer.publishing.progress import read_progress
from trainer.publishing.publish import Publisher
from trainer.recipe import Recipe
from trainer.settings import TrainerSettings
from trainer.update import Plan, claim_rule, plan_update

log = structlog.get_logger()

T = TypeVar("T")
# Seconds between attempts to write a version that the disk refused.
WRITE_AGAIN_S: Final = 5.0


class Loop:
    """Runs the updates of one policy, one after the other."""

    def __init__(
        self,
        settings: TrainerSettings,
        recipe: Recipe,
        engine: AsyncEngine,
        publisher: Publisher,
        learner: LearnerProtocol,
        policy: str,
    ) -> None:
        """Connect the parts of the loop; `policy` is the name of the policy in training."""
        self._adapter_dir = settings.adapter_dir
        self._recipe = recipe
        self._engine = engine
        self._publisher = publisher
        self._learner = learner
        self._policy = policy
        self._told_of_the_end = False
        rule = claim_rule(recipe, policy)
        told = recipe.model_dump(mode="json")
        self._claiming = Claiming(engine, rule, told)
        self._expiring = Expiring(engine, rule, told)

    async def recover(self) -> None:
        """Finish or abandon the update that a killed trainer left, and publish what it had written.

        Raises:
            AdapterError: a version's files are missing or differ from its manifest.
        """
        async with self._engine.connect() as connection:
            running = await claims.running_update(connection, self._policy)
        if running is not None:
            await self._finish_or_release(running, "the trainer was killed")
        adapters.sweep(self._adapter_dir, self._policy)
        written = [v for v in await self._versions() if v.state == "written"]
        for version in written[:-1]:
            await self._set_rejected(version)
        for version in written[-1:]:
            manifest = adapters.read_manifest(Path(version.adapter_path or ""))
            if manifest is None:
                raise AdapterError(f"the files of {version.served_name} are gone")
            await self._publish(version, await self._serving(), manifest.probe)

    async def _finish_or_release(self, update_id: UUID, why: str) -> None:
        found = adapters.find_update(self._adapter_dir, self._policy, update_id)
        async with self._engine.begin() as connection:
            if found is None:
                freed = await claims.release(connection, update_id, why)
                log.warning("update_abandoned", update=str(update_id), episodes_freed=freed)
                return
            folder, manifest = found
            await claims.consume(
                connection,
                update_id,
                manifest.outcomes,
                manifest.metrics,
                policy=self._policy,
                version=manifest.version,
                adapter_path=str(folder),
                baselines=manifest.baselines,
            )
        self._count_outcomes(manifest.outcomes)
        log.warning("update_finished_late", update=str(update_id), version=manifest.version)

    async def sync_adapters(self) -> None:
        """Load the adapters that the store lists as servable, and unload those that are retired."""
        await self._publisher.keep_loaded()
        await self._publisher.retire_idle()

    async def update_once(self) -> bool:
        """Run one update if enough episodes are ready; return whether there was one."""
        started = perf_counter()
        parent = await self._serving()
        await self._expiring.look(parent.version)
        if self._has_ended(parent):
            return False
        try:
            if not await self._update(parent):
                return False
        except asyncio.CancelledError:
            await self._leave()
            raise
        UPDATE_SECONDS.labels(self._policy).observe(perf_counter() - started)
        return True

    async def _update(self, parent: PolicyVersion) -> bool:
        while (claim := await self._claiming.take(parent.version)) is not None:
            if await self._run(claim, parent):
                self._claiming.went_well()
                return True
        return False

    async def _run(self, claim: Claim, parent: PolicyVersion) -> bool:
        """Whether the claim came to its end; else it was undone, and another may be taken."""
        async with self._engine.connect() as connection:
            next_version = max(
                await claims.next_version(connection, self._policy),
                adapters.highest_version(self._adapter_dir, self._policy) + 1,
            )
        plan = plan_update(claim, self._recipe)
        log.info("update_begun", update=str(claim.update_id), version=next_version, **plan.metrics)
        if not plan.rows:
            await self._consume(claim, plan, plan.metrics)
            return True
        try:
            await self._make(claim, plan, parent, next_version)
        except Unusable as error:
            await self._claiming.put_right(claim.update_id, error)
            return False
        except LearnerError as error:
            await self._give_up(claim, plan, error)
        return True

    async def _make(
        self, claim: Claim, plan: Plan, parent: PolicyVersion, next_version: int
    ) -> None:
        metrics = plan.metrics | await self._train(parent, plan.rows)
        probe = await self._in_thread(partial(self._probe_rows, plan.rows))
        path = await self._write(
            partial(
                adapters.write_version,
                self._adapter_dir,
                self._policy,
                next_version,
                self._learner.save,
                update_id=claim.update_id,
                parent_version=parent.version,
                outcomes=plan.outcomes,
                metrics=metrics,
                probe=probe,
                baselines=plan.baselines,
            )
        )
        self._learner.saved_as(path)
        await self._consume(claim, plan, metrics, next_version, str(path))
        version = next(v for v in await self._versions() if v.version == next_version)
        await self._publish(version, parent, probe)
        adapters.sweep(self._adapter_dir, self._policy)

    async def _train(self, parent: PolicyVersion, rows: Sequence[Row]) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            self._learner.restore(self._folder(parent))
            return self._learner.update(rows)

        return await self._in_thread(work)

    def _folder(self, version: PolicyVersion) -> Path | None:
        if not version.version:
            return None
        return adapters.version_folder(self._adapter_dir, self._policy, version.version)

    def _has_ended(self, parent: PolicyVersion) -> bool:
        """Return True if the recipe's schedule has ended at `parent`; log that once."""
        rule = self._recipe.optimizer
        if rule.schedule == "constant":
            return False
        folder = self._folder(parent)
        taken = 0 if folder is None else read_progress(folder)
        ended = has_ended(rule, taken)
        if ended and not self._told_of_the_end:
            log.warning("schedule_ended", steps_taken=taken, remedy="raise optimizer.total_steps")
        self._told_of_the_end = ended
        return ended

    async def _write(self, write: Callable[[], Path]) -> Path:
        """Write a version; if the disk refuses, keep the trained weights and try again."""
        while True:
            try:
                return await self._in_thread(write)
            except OSError as error:
                log.error("version_not_written", reason=str(error), again_in_s=WRITE_AGAIN_S)
                await asyncio.sleep(WRITE_AGAIN_S)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread; a cancelled caller waits until it has ended."""
        running = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._learner.interrupt()
            await asyncio.wait([running])
            raise

    def _probe_rows(self, rows: Sequence[Row]) -> tuple[ProbeRow, ...]:
        """Return a few of the update's rows with the new policy's log-probabilities."""
        chosen = rows[: self._recipe.publish.probe_rows]
        found = self._learner.logprobs(chosen)
        return tuple(
            ProbeRow(ids=row.ids, logprobs=tuple(logprobs))
            for row, logprobs in zip(chosen, found, strict=True)
        )

    async def _consume(
        self,
        claim: Claim,
        plan: Plan,
        metrics: dict[str, Any],
        version: int | None = None,
        path: str | None = None,
    ) -> None:
        async with self._engine.begin() as connection:
            await claims.consume(
                connection,
                claim.update_id,
                plan.outcomes,
                metrics,
                policy=self._policy,
                version=version,
                adapter_path=path,
                baselines=plan.baselines,
            )
        self._count(plan, metrics, "trained" if version else "no_signal")
        log.info("update_done", update=str(claim.update_id), version=version, **metrics)

    def _count(self, plan: Plan, metrics: dict[str, Any], outcome: str) -> None:
        UPDATES.labels(self._policy, outcome).inc()
        self._count_outcomes(plan.outcomes)
        TRAINED_TOKENS.labels(self._policy).inc(sum(len(row.sampled_ids) for row in plan.rows))
        self._show(metrics)

    def _show(self, metrics: dict[str, Any]) -> None:
        for name, gauge in UPDATE.items():
            if metrics.get(name) is not None:
                gauge.labels(self._policy).set(metrics[name])

    async def _publish(
        self,
        version: PolicyVersion,
        before: PolicyVersion,
        rows: Sequence[ProbeRow],
    ) -> None:
        try:
            probe = await self._publisher.publish(version, before.served_name, rows)
        except PublishError:
            UPDATES.labels(self._policy, "rejected").inc()
            return
        VERSION.labels(self._policy).set(version.version)
        UPDATE["probe_difference"].labels(self._policy).set(probe.mean_difference)
        log.info(
            "version_probed",
            version=version.served_name,
            mean_difference=round(probe.mean_difference, 5),
            largest_difference=round(probe.largest_difference, 5),
            moved=round(probe.moved, 5),
            tokens=probe.tokens,
        )

    async def _leave(self) -> None:
        """Handle a stop from outside: record a written version, or release the episodes at once."""
        try:
            async with self._engine.connect() as connection:
                running = await claims.running_update(connection, self._policy)
            if running is not None:
                await self._finish_or_release(running, "the trainer was stopped")
        except Exception as error:
            if not (is_unavailable(error) or isinstance(error, ClaimLost)):
                raise
            # The next trainer of the policy finds the update (`recover`).
            log.warning("update_left", reason=str(error))

    def _count_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        for one in outcomes:
            EPISODES.labels(self._policy, one.reason or "trained").inc()

    async def _give_up(self, claim: Claim, plan: Plan, why: LearnerError) -> None:
        """Consume the episodes of an update that failed, and publish nothing.

        If they were released, the same episodes would be claimed and fail again for ever.
        """
        outcomes = [
            Outcome(episode_id=one.episode_id, trained=False, reason=one.reason or why.reason)
            for one in plan.outcomes
        ]
        async with self._engine.begin() as connection:
            await claims.consume(
                connection,
                claim.update_id,
                outcomes,
                {"error": str(why), **why.metrics},
                policy=self._policy,
                version=None,
                adapter_path=None,
                baselines=plan.baselines,
            )
        self._count_outcomes(outcomes)
        UPDATES.labels(self._policy, "failed").inc()
        self._show(why.metrics)
        log.error("update_failed", update=str(claim.update_id), reason=str(why), **why.metrics)

    async def _versions(self) -> list[PolicyVersion]:
        async with self._engine.connect() as connection:
            return await policies.list_versions(connection, self._policy)

    async def _serving(self) -> PolicyVersion:
        return next(v for v in await self._versions() if v.state == "serving")

    async def _set_rejected(self, version: PolicyVersion) -> None:
        async with self._engine.begin() as connection:
            await policies.set_state(connection, self._policy, version.version, "rejected")
