"""Record the end of an update: its episodes are consumed in one transaction, then counted."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store.schema.trained import MANIFEST_SHA256
from store.updates import claims
from store.updates.claims import Claim, Outcome
from trainer.metrics import EPISODES, TRAINED_TOKENS, UPDATE, UPDATES
from trainer.publishing.adapters import MANIFEST, Manifest, NewVersion, written_sha256
from trainer.updates.plan import Plan

log = structlog.get_logger()


class Recording:
    """Record how the updates of one policy end, in the store, the metrics and the log."""

    def __init__(self, engine: AsyncEngine, policy: str) -> None:
        """Store the database and the policy's name."""
        self._engine = engine
        self._policy = policy

    async def without_version(self, claim: Claim, plan: Plan) -> None:
        """Record an update in which no episode gives a signal: it makes no version."""
        await self._consume(claim.update_id, plan.outcomes, plan.metrics, plan.baselines)
        self._count(claim, plan, plan.metrics, None)

    async def with_version(
        self, claim: Claim, plan: Plan, metrics: dict[str, Any], version: int, folder: Path
    ) -> None:
        """Record an update that wrote `version` into `folder`."""
        await self._consume(
            claim.update_id, plan.outcomes, metrics, plan.baselines, (version, folder)
        )
        self._count(claim, plan, metrics, version)

    async def found_version(self, update_id: UUID, folder: Path, manifest: Manifest) -> None:
        """Record the update of an earlier trainer, from the manifest that it wrote."""
        await self._consume(
            update_id,
            manifest.outcomes,
            manifest.metrics,
            manifest.baselines,
            (manifest.version, folder),
        )
        self._count_outcomes(manifest.outcomes)
        log.warning("update_finished_late", update=str(update_id), version=manifest.version)

    async def imported_version(self, new: NewVersion, folder: Path) -> None:
        """Record the version `new`, whose adapter comes from elsewhere and lies in `folder` now."""
        made = (new.version, folder)
        await self._consume(new.update_id, new.outcomes, new.metrics, new.baselines, made)
        log.info("version_imported", version=new.version, **new.metrics)

    async def _consume(
        self,
        update_id: UUID,
        outcomes: Sequence[Outcome],
        metrics: Mapping[str, Any],
        baselines: Mapping[str, Any] | None,
        made: tuple[int, Path] | None = None,
    ) -> None:
        """Consume an update's episodes; `made` is the number and folder of its version, if any.

        Raises:
            FilesUnread: the version's manifest cannot be read for now; nothing is recorded.
        """
        version, folder = made or (None, None)
        if folder is not None:
            # So that nobody can exchange the files, and the manifest that vouches for them.
            metrics = {**metrics, MANIFEST_SHA256: written_sha256(folder / MANIFEST)}
        async with self._engine.begin() as connection:
            await claims.consume(
                connection,
                update_id,
                outcomes,
                metrics,
                policy=self._policy,
                version=version,
                adapter_path=None if folder is None else str(folder),
                baselines=baselines,
            )

    def _count(
        self, claim: Claim, plan: Plan, metrics: dict[str, Any], version: int | None
    ) -> None:
        UPDATES.labels(self._policy, "trained" if version else "no_signal").inc()
        self._count_outcomes(plan.outcomes)
        TRAINED_TOKENS.labels(self._policy).inc(sum(len(row.sampled_ids) for row in plan.rows))
        self._show(metrics)
        log.info("update_done", update=str(claim.update_id), version=version, **metrics)

    def _count_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        for one in outcomes:
            EPISODES.labels(self._policy, one.reason or "trained").inc()

    def _show(self, metrics: Mapping[str, Any]) -> None:
        """Set the gauges of the last update."""
        for name, gauge in UPDATE.items():
            if metrics.get(name) is not None:
                gauge.labels(self._policy).set(metrics[name])
