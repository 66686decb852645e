"""Record how updates end; finish or release an update that a killed or stopped trainer left.

A version exists from the moment its folder is renamed into place. A running update whose folder
exists is recorded from the folder's manifest; a running update without a folder is abandoned, and
its episodes are free again.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.claims import Claim, Outcome
from store.database import is_unavailable
from store.errors import ClaimLost, ClaimSpoilt
from store.schema.tables import MANIFEST_SHA256
from trainer.batches import RowKey
from trainer.errors import FilesUnread
from trainer.metrics import EPISODES, UPDATE_GAUGES, UPDATES
from trainer.publishing import adapters
from trainer.publishing.adapters import MANIFEST, Manifest, NewVersion, version_file_sha256
from trainer.updates.plan import Plan

log = structlog.get_logger()

# The reason recorded for an update whose trainer was killed and could record none.
KILLED: Final = "the trainer was killed"


class Recording:
    """Record how the updates of one policy end, in the store, the metrics and the log."""

    def __init__(self, engine: AsyncEngine, policy: str, rule: Mapping[str, Any]) -> None:
        """Store the rule of new versions (`trainer.updates.versions.publishing_rule`)."""
        self.engine = engine
        self.policy = policy
        self._rule = rule

    async def record_update(
        self,
        claim: Claim,
        plan: Plan,
        metrics: Mapping[str, Any],
        made: tuple[int, Path] | None = None,
        policy_logprobs: Mapping[RowKey, bytes] = MappingProxyType({}),
    ) -> None:
        """Record an update; `made` is its version's number and folder, or None without a signal.

        `policy_logprobs` are stored for each call, by row (`LearnerProtocol.policy_logprobs`).
        """
        await self._consume(claim.update_id, plan.outcomes, metrics, plan.baselines, made)
        version = made and made[0]
        UPDATES.labels(self.policy, "trained" if version else "no_signal").inc()
        self._count(plan.outcomes)
        for name, gauge in UPDATE_GAUGES.items():
            if metrics.get(name) is not None:
                gauge.labels(self.policy).set(metrics[name])
        log.info("update_done", update=str(claim.update_id), version=version, **metrics)
        # In a transaction of its own, so that the one above holds its locks no longer than needed.
        of_calls = {
            one.call.id: policy_logprobs.get((one.episode_id, one.position))
            for one in plan.credited
        }
        async with self.engine.begin() as connection:
            await claims.keep_policy_logprobs(connection, of_calls)

    async def record_found_version(self, update_id: UUID, folder: Path, manifest: Manifest) -> None:
        """Record the update that a stopped trainer left, from the `manifest` in `folder`."""
        made = (manifest.version, folder)
        await self._consume(
            update_id, manifest.outcomes, manifest.metrics, manifest.baselines, made
        )
        self._count(manifest.outcomes)
        log.warning("update_finished_late", update=str(update_id), version=manifest.version)

    async def record_imported_version(self, new: NewVersion, folder: Path) -> None:
        """Record the imported version `new`, whose files are now in `folder`."""
        made = (new.version, folder)
        await self._consume(new.update_id, new.outcomes, new.metrics, new.baselines, made)
        log.info("version_imported", version=new.version, **new.metrics)

    async def _consume(
        self,
        update_id: UUID,
        outcomes: Sequence[Outcome],
        metrics: Mapping[str, Any],
        baselines: Mapping[str, Any] | None,
        made: tuple[int, Path] | None,
    ) -> None:
        """Consume an update's episodes and record its version (`made`: number and folder), if any.

        Raises:
            FilesUnread: the version's manifest cannot be read for now; nothing is recorded.
        """
        version, folder = made or (None, None)
        if folder is not None:
            # Reveals later if the files are replaced together with their manifest.
            metrics = {**metrics, MANIFEST_SHA256: version_file_sha256(folder / MANIFEST)}
        async with self.engine.begin() as connection:
            await claims.record_update(
                connection,
                update_id,
                outcomes,
                metrics,
                policy=self.policy,
                version=version,
                adapter_path=None if folder is None else str(folder),
                rule=self._rule,
                baselines=baselines,
            )

    def _count(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            EPISODES.labels(self.policy, outcome.reason or "trained").inc()


class Recovery:
    """Finish or abandon one policy's unfinished updates."""

    def __init__(self, recording: Recording, adapter_dir: Path) -> None:
        self._recording = recording
        self._engine = recording.engine
        self._policy = recording.policy
        self._adapter_dir = adapter_dir

    async def finish(self, why: str) -> None:
        """Record the running update if its version exists; else release its episodes.

        `why` is recorded with the released update.

        Raises:
            FilesUnread: files cannot be read for now, so it is unknown if the version exists.
            ClaimLost: another trainer has ended the update meanwhile.
        """
        async with self._engine.connect() as connection:
            running = await claims.running_update(connection, self._policy)
        if running is None:
            return
        written = adapters.find_update(self._adapter_dir, self._policy, running)
        if written is None:
            await self.abandon_update(running, why)
            return
        try:
            await self._recording.record_found_version(running, *written)
        except ClaimSpoilt as error:
            await self.abandon_update(running, str(error))

    async def finish_if_possible(self, why: str) -> None:
        """Call `finish`; only log if database or files are away, or another trainer took over.

        Then the policy's next trainer finishes the update.
        """
        try:
            await self.finish(why)
        except Exception as error:
            if not (is_unavailable(error) or isinstance(error, (ClaimLost, FilesUnread))):
                raise
            log.warning("update_left", reason=str(error))

    async def abandon_update(self, update_id: UUID, why: str) -> None:
        """Abandon a running update: its episodes are free again, and its version is not recorded.

        If the update wrote a folder, no later version gets the folder's number.
        """
        async with self._engine.begin() as connection:
            freed = await claims.release(connection, update_id, why)
        log.warning("update_abandoned", update=str(update_id), episodes_freed=freed)
