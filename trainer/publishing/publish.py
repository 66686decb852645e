"""Load a written version, probe it, and promote it to serve the traffic.

A version that does not load or fails the probe is rejected, and the one before keeps the
traffic. Adapters that a restarted server lost are loaded again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.records import PolicyState, PolicyVersion
from store.updates import policies
from trainer.errors import PublishError
from trainer.metrics import UPDATE, UPDATES, VERSION
from trainer.publishing.probe import ProbeResult, ProbeRow, compare, rejection_reason
from trainer.publishing.replicas import Replicas
from trainer.publishing.server import ModelServer
from trainer.recipes.adapter import PublishOptions

log = structlog.get_logger()

# All proxies know of a change after this long; they read the policies twice a second.
PROXY_REFRESH_S: Final = 10.0


class Publisher:
    """Publish and retire the versions of one policy."""

    def __init__(
        self,
        engine: AsyncEngine,
        servers: Replicas,
        policy: str,
        rule: PublishOptions,
        together: Sequence[str] = (),
    ) -> None:
        """Store the model servers, the policy's name and the recipe's `[publish]` rule.

        `together` are the policies that must go live together, this one among them, if any must.
        """
        self._engine = engine
        self._servers = servers
        self._policy = policy
        self._rule = rule
        self._together = tuple(together) or (policy,)

    async def publish(
        self,
        version: PolicyVersion,
        before: str,
        rows: Sequence[ProbeRow],
    ) -> ProbeResult:
        """Load `version`, probe it with `rows`, and promote it once all go live that must together.

        `before` is the served name of the version that has the traffic now.

        Raises:
            PublishError: the version was rejected; nothing changes for any request.
            UpstreamAway: a server does not answer; the version stays `written`.
        """
        assert version.adapter_path is not None
        try:
            await self._servers.load(version.served_name, Path(version.adapter_path))
            probe = await self._probe(version.served_name, before, rows)
        except PublishError as error:
            await self._set_state(version.version, "rejected")
            await self._servers.unload(version.served_name)
            log.error("version_rejected", version=version.served_name, reason=str(error))
            raise
        async with self._engine.begin() as connection:
            await policies.make_ready(connection, self._policy, version.version)
            promoted = await self._promote(connection)
        if not promoted:
            log.info("version_ready", version=version.served_name, goes_with=self._together)
        self._tell(promoted)
        return probe

    async def go_live(self) -> None:
        """Promote what is ready, if all that go live together are, or have waited long enough.

        It is one transaction, and proxies read all versions at once: no new episode gets a new
        version of one policy and the old one of another. Whichever trainer comes first does it.
        """
        async with self._engine.begin() as connection:
            promoted = await self._promote(connection)
        self._tell(promoted)

    async def _promote(self, connection: AsyncConnection) -> list[PolicyVersion]:
        wait_s = self._rule.wait_for_others_s
        return await policies.promote_together(connection, self._together, wait_s)

    def _tell(self, promoted: Sequence[PolicyVersion]) -> None:
        for version in promoted:
            VERSION.labels(version.name).set(version.version)
            log.info("version_promoted", version=version.served_name)

    async def try_to_publish(
        self, version: PolicyVersion, before: str, rows: Sequence[ProbeRow]
    ) -> str | None:
        """Publish `version` if it is served correctly; else the one before keeps the traffic.

        Return why it was rejected, or None. The result is counted and logged. The arguments are
        those of `publish`.

        Raises:
            UpstreamAway: a server does not answer; the version stays `written`.
        """
        try:
            probe = await self.publish(version, before, rows)
        except PublishError as error:
            UPDATES.labels(self._policy, "rejected").inc()
            return str(error)
        UPDATE["probe_difference"].labels(self._policy).set(probe.mean_difference)
        log.info(
            "version_probed",
            version=version.served_name,
            mean_difference=round(probe.mean_difference, 5),
            largest_difference=round(probe.largest_difference, 5),
            moved=round(probe.moved, 5),
            tokens=probe.tokens,
        )
        return None

    async def _probe(self, name: str, before: str, rows: Sequence[ProbeRow]) -> ProbeResult:
        """Probe every replica and return the worst result."""
        probes = [
            await self._probe_one(server, name, before, rows) for server in self._servers.each
        ]
        return max(probes, key=lambda probe: probe.mean_difference)

    async def _probe_one(
        self, server: ModelServer, name: str, before: str, rows: Sequence[ProbeRow]
    ) -> ProbeResult:
        trained = [row.logprobs for row in rows]
        served = await _served_logprobs(server, name, rows)
        probe = compare(served, trained, await _served_logprobs(server, before, rows))
        reason = rejection_reason(probe, self._rule.tolerance)
        if reason is not None:
            raise PublishError(reason)
        return probe

    async def _set_state(self, version: int, state: PolicyState) -> None:
        async with self._engine.begin() as connection:
            await policies.set_state(connection, self._policy, version, state)

    async def keep_loaded(self) -> None:
        """Load again the adapters that should be servable and are not (a server was restarted)."""
        listed = await self._servers.models()
        for version in await self._versions():
            wanted = version.state in ("serving", "ready", "published") and version.version > 0
            if wanted and version.served_name not in listed:
                await self._load_again(version)

    async def _load_again(self, version: PolicyVersion) -> None:
        try:
            await self._servers.load(version.served_name, Path(version.adapter_path or ""))
        except PublishError as error:
            # It is tried again at the next sync; training and other versions go on meanwhile.
            log.error("version_not_reloaded", version=version.served_name, reason=str(error))
            return
        log.info("version_reloaded", version=version.served_name)

    async def retire_idle(self) -> None:
        """Retire published versions that no episode has used for a while.

        They are taken from the proxies first and, once all proxies know, from the model servers.
        The files stay: vLLM's engine dies over a missing folder.
        """
        for version in await self._idle("retired", PROXY_REFRESH_S):
            for server in self._servers.each:
                if version.served_name in await server.models():
                    await server.unload(version.served_name)
                    log.info("version_unloaded", version=version.served_name)
        for version in await self._idle("published", self._rule.retire_after_s):
            await self._set_state(version.version, "retired")

    async def _idle(self, state: PolicyState, idle_s: float) -> list[PolicyVersion]:
        async with self._engine.connect() as connection:
            return await policies.idle_versions(connection, self._policy, state, idle_s)

    async def _versions(self) -> list[PolicyVersion]:
        async with self._engine.connect() as connection:
            return await policies.list_versions(connection, self._policy)


async def _served_logprobs(
    server: ModelServer, name: str, rows: Sequence[ProbeRow]
) -> list[list[float]]:
    return [(await server.prompt_logprobs(name, row.ids))[-len(row.logprobs) :] for row in rows]
