"""Publish a written version: load it, probe it, and promote it, or let it wait for a decision.

A version is rejected if it is too far from its base model, does not load, or fails the probe. Then
the serving version keeps the traffic.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store import version_states
from store.errors import RolledBack, StateChanged
from store.read.gates import newest_promoted
from store.schema.tables import KL_TO_BASE
from store.version_states import lock_policies, set_state
from store.versions import PolicyVersion
from trainer.errors import PublishError
from trainer.metrics import TRAINED_VERSION, UPDATE_GAUGES, UPDATES
from trainer.publishing.adapters import check_files
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.publishing.probe import ProbeResult, ProbeRow, compare_served, rejection_reason
from trainer.recipes.recipe import PublishOptions, Recipe

log = structlog.get_logger()

# The recorded reason for which a version becomes `loaded`.
PROBED_REASON: Final = "it is loaded, and served as it was trained"


class Publisher:
    """Publish the versions of one policy."""

    def __init__(
        self,
        engine: AsyncEngine,
        servers: Replicas,
        policy: str,
        recipe: Recipe,
        together: Sequence[str] = (),
        known: Sequence[str] | None = None,
    ) -> None:
        """Store the model servers, the policy's name and the recipe's rules for its versions.

        `together` are the policies that must go live together, this one included (empty: none);
        `known` are the configured policies (None: all that have versions).
        """
        self._engine = engine
        self.servers = servers
        self._policy = policy
        self._rule = recipe.publish
        self._judged_by = recipe.judged_by
        self.together = tuple(together) or (policy,)
        self.known = known

    async def publish(
        self, version: PolicyVersion, before: str, rows: Sequence[ProbeRow]
    ) -> str | None:
        """Load `version`, probe it on the replicas that answer, and promote it unless it must wait.

        If it must, it stays `loaded`: `go_live` promotes it once the versions that go live together
        are loaded or `wait_for_others_s` is over; the controller or a person, if the recipe asks
        for a decision. `before` is the served name of the serving version. Return why `version` was
        rejected, or None if it was not.

        Raises:
            UpstreamAway: no server answers; the version stays `written`.
            FilesUnread: its files cannot be read for now; the version stays `written`.
        """
        assert version.adapter_path is not None
        try:
            check_forgetting(version, self._rule)
            await check_files(version)
            loaded = await self.servers.load(
                version.served_name, Path(version.adapter_path), version.manifest_sha256
            )
            probe = await self._probe(loaded, version.served_name, before, rows)
        except PublishError as error:
            await self._reject(version, error)
            return await self._unload_rejected(version, error)
        try:
            promoted = await self._make_loaded(version)
        except (StateChanged, RolledBack) as error:
            return await self._unload_rejected(version, error)
        if not promoted:
            log.info("version_waits", version=version.served_name, goes_with=self.together)
        self._show_promoted(promoted)
        UPDATE_GAUGES["probe_difference"].labels(self._policy).set(probe.mean_difference)
        log.info(
            "version_probed",
            version=version.served_name,
            mean_difference=round(probe.mean_difference, 5),
            largest_difference=round(probe.largest_difference, 5),
            moved=round(probe.moved, 5),
            tokens=probe.tokens,
        )
        return None

    async def _unload_rejected(self, version: PolicyVersion, why: Exception) -> str:
        """Unload a rejected version, and return the reason."""
        try:
            await self.servers.unload(version.served_name)
        except PublishError as error:
            why = error
        log.error("version_rejected", version=version.served_name, reason=str(why))
        UPDATES.labels(self._policy, "rejected").inc()
        return str(why)

    async def _make_loaded(self, version: PolicyVersion) -> list[PolicyVersion]:
        """Set a probed version's state to `loaded`; return the versions that are promoted now.

        Raises:
            StateChanged, RolledBack: the version was taken down meanwhile, with its parent.
        """
        async with self._engine.begin() as connection:
            # Lock all of them: the trainer of another policy may promote versions at this moment.
            await lock_policies(connection, self.together)
            await version_states.make_loaded(
                connection,
                self._policy,
                version.version,
                self._judged_by,
                reason=PROBED_REASON,
                actor="trainer",
            )
            return await self._promote(connection)

    async def go_live(self) -> None:
        """Promote the loaded versions of `together` at once, if all are loaded or the wait is over.

        They are promoted in one transaction, and proxies read all versions at once. So no new
        episode gets a new version of one policy and the old version of another. The trainer of any
        of the policies may do it. Metrics also show versions that others promoted.
        """
        async with self._engine.begin() as connection:
            promoted = await self._promote(connection)
            newest = await newest_promoted(connection, self._policy)
        self._show_promoted(promoted)
        TRAINED_VERSION.labels(self._policy).set(newest)

    async def _promote(self, connection: AsyncConnection) -> list[PolicyVersion]:
        if not self._rule.serves_at_once:
            return []
        wait_s = self._rule.wait_for_others_s
        return await version_states.promote_together(connection, self.together, wait_s)

    def _show_promoted(self, promoted: Sequence[PolicyVersion]) -> None:
        for version in promoted:
            TRAINED_VERSION.labels(version.name).set(version.version)
            log.info("version_promoted", version=version.served_name)

    async def _probe(
        self, servers: Sequence[ModelServer], name: str, before: str, rows: Sequence[ProbeRow]
    ) -> ProbeResult:
        """Probe `name` on all `servers` that answer; return the result with the largest mean."""
        probes = await self.servers.ask(
            lambda server: self._probe_one(server, name, before, rows), servers
        )
        return max(probes.values(), key=lambda probe: probe.mean_difference)

    async def _probe_one(
        self, server: ModelServer, name: str, before: str, rows: Sequence[ProbeRow]
    ) -> ProbeResult:
        trained = [row.logprobs for row in rows]
        served = await server.probe_logprobs(name, rows)
        other = await self._model_to_differ_from(server, name, before)
        probe = compare_served(served, trained, await server.probe_logprobs(other, rows))
        reason = rejection_reason(probe, self._rule.tolerance)
        if reason is not None:
            raise PublishError(reason)
        return probe

    async def _model_to_differ_from(self, server: ModelServer, name: str, before: str) -> str:
        """Return the model whose values must differ from those of `name`: `before`, or the base.

        A restarted server lacks `before` until the controller loads it, which may never happen, and
        waiting would hold back the version that repairs the policy. The base model serves as well:
        a server that ignores an adapter computes as the base model.
        """
        listed = await server.models()
        if before in listed or name not in listed:
            return before
        log.warning("probed_against_base", version=name, lost=before, replica=server.url)
        return await server.base_of(name)

    async def _reject(self, version: PolicyVersion, error: PublishError) -> None:
        try:
            async with self._engine.begin() as connection:
                await set_state(
                    connection,
                    self._policy,
                    version.version,
                    "rejected",
                    reason=str(error),
                    actor="trainer",
                    evidence=error.evidence,
                )
        except (StateChanged, RolledBack) as changed:
            # A roll-back or a retraining took the version down meanwhile.
            log.info("version_not_rejected", version=version.served_name, reason=str(changed))


def check_forgetting(version: PolicyVersion, rule: PublishOptions) -> None:
    """Check a version's KL to the base model against the recipe's bound, if both exist.

    An imported version has no KL, because Pawl did not train it.

    Raises:
        PublishError: the KL is above the bound.
    """
    kl, most = version.kl_to_base, rule.most_kl_to_base
    if kl is None or most is None or kl <= most:
        return
    raise PublishError(
        f"its KL to the base model is {kl:.4g} nats a token on its training data, and"
        f" publish.most_kl_to_base is {most:g}: it may have lost other skills; set"
        " kl.coefficient, lower optimizer.learning_rate, or raise the bound",
        {KL_TO_BASE: kl, "most_kl_to_base": most},
    )
