"""Load a written version, probe it, and promote it to serve the traffic.

A version that does not load or fails the probe is rejected, and the one before keeps the
traffic. Adapters that a restarted server lost are loaded again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.records import UNSERVED, PolicyState, PolicyVersion
from store.updates import policies
from trainer.errors import PublishError, UpstreamAway
from trainer.metrics import UPDATE, UPDATES, VERSION
from trainer.publishing.cleaning import Cleaning
from trainer.publishing.probe import ProbeResult, ProbeRow, compare, rejection_reason
from trainer.publishing.replicas import Replicas
from trainer.publishing.servable import belonging, lacking
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
        known: Sequence[str] | None = None,
    ) -> None:
        """Store the model servers, the policy's name and the recipe's `[publish]` rule.

        `together` are the policies that must go live together, this one among them, if any must;
        `known` are all that are configured (None: all that have versions).
        """
        self._engine = engine
        self.servers = servers
        self._policy = policy
        self._rule = rule
        self.together = tuple(together) or (policy,)
        self.known = known

    async def publish(
        self,
        version: PolicyVersion,
        before: str,
        rows: Sequence[ProbeRow],
    ) -> ProbeResult:
        """Load `version` and probe it on the replicas that answer, and promote it.

        It is promoted once all are ready that must go live together.

        `before` is the served name of the version that has the traffic now.

        Raises:
            PublishError: the version was rejected; nothing changes for any request.
            UpstreamAway: no server answers; the version stays `written`.
        """
        assert version.adapter_path is not None
        # A replica may have been restarted since: the probe asks it for `before`, too.
        await self.keep_loaded()
        try:
            loaded = await self.servers.load(version.served_name, Path(version.adapter_path))
            probe = await self._probe(loaded, version.served_name, before, rows)
        except PublishError as error:
            await self._set_state(version.version, "rejected")
            await self.servers.unload(version.served_name)
            log.error("version_rejected", version=version.served_name, reason=str(error))
            raise
        async with self._engine.begin() as connection:
            await policies.make_ready(connection, self._policy, version.version)
            promoted = await self._promote(connection)
        if not promoted:
            log.info("version_ready", version=version.served_name, goes_with=self.together)
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
        return await policies.promote_together(connection, self.together, wait_s)

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
            UpstreamAway: no server answers; the version stays `written`.
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

    async def _probe(
        self, servers: Sequence[ModelServer], name: str, before: str, rows: Sequence[ProbeRow]
    ) -> ProbeResult:
        """Probe every one of `servers` that answers, and return the worst result."""
        probes = await self.servers.ask(
            lambda server: self._probe_one(server, name, before, rows), servers
        )
        return max(probes.values(), key=lambda probe: probe.mean_difference)

    async def _probe_one(
        self, server: ModelServer, name: str, before: str, rows: Sequence[ProbeRow]
    ) -> ProbeResult:
        trained = [row.logprobs for row in rows]
        served = await _served_logprobs(server, name, rows)
        other = await self._other_than(server, name, before)
        probe = compare(served, trained, await _served_logprobs(server, other, rows))
        reason = rejection_reason(probe, self._rule.tolerance)
        if reason is not None:
            raise PublishError(reason)
        return probe

    async def _other_than(self, server: ModelServer, name: str, before: str) -> str:
        """Return what the answers of `name` must differ from: those of `before`, if it is there.

        One that could not be loaded again may never be. To wait for it would keep back the version
        that repairs the policy; and a server that ignores an adapter answers as its base model.
        """
        listed = await server.models()
        if before in listed or name not in listed:
            return before
        log.warning("probed_against_base", version=name, lost=before, replica=server.url)
        return await server.base_of(name)

    async def _set_state(self, version: int, state: PolicyState) -> None:
        async with self._engine.begin() as connection:
            await policies.set_state(connection, self._policy, version, state)

    async def keep_loaded(self) -> None:
        """Load again the adapters that a replica should serve and does not (it was restarted).

        The steward does so, too, and whether a trainer runs or not.
        """
        async with self._engine.connect() as connection:
            versions = await policies.list_servable(connection, self._policy)
        for server, listed in (await self.servers.ask(ModelServer.models)).items():
            for version in lacking(belonging(versions, listed), listed):
                await self._load_again(server, version)

    async def _load_again(self, server: ModelServer, version: PolicyVersion) -> None:
        try:
            await server.load(version.served_name, Path(version.adapter_path or ""))
        except (PublishError, UpstreamAway) as error:
            # It is tried again at the next sync; training and other versions go on meanwhile.
            log.error("version_not_reloaded", version=version.served_name, reason=str(error))
            return
        log.info("version_reloaded", version=version.served_name, replica=server.url)

    async def retire_idle(self) -> None:
        """Retire published versions that no episode has used for a while.

        They are taken from the proxies first and, once all proxies know, from the model servers.
        The files stay until `clean`: vLLM's engine dies over a missing folder. What was rejected
        while a replica was away is taken from that replica.
        """
        idle = [one.served_name for one in await self._idle(UNSERVED, PROXY_REFRESH_S)]
        for server, listed in (await self.servers.ask(ModelServer.models)).items():
            for name in idle:
                if name in listed:
                    await self._unload(server, name)
        for version in await self._idle(["published"], self._rule.retire_after_s):
            await self._set_state(version.version, "retired")

    async def clean(self, root: Path) -> None:
        """Delete the files below `root` that nothing can ask for any more."""
        idle_s = self._rule.retire_after_s
        await Cleaning(self._engine, self.servers, self._policy, root, idle_s).clean()

    async def _unload(self, server: ModelServer, name: str) -> None:
        try:
            await server.unload(name)
        except (PublishError, UpstreamAway) as error:
            # It is tried again at the next sync, for as long as the server lists it.
            log.error("version_not_unloaded", version=name, reason=str(error))
            return
        log.info("version_unloaded", version=name, replica=server.url)

    async def _idle(self, states: Sequence[PolicyState], idle_s: float) -> list[PolicyVersion]:
        async with self._engine.connect() as connection:
            return await policies.idle_versions(connection, self._policy, states, idle_s)


async def _served_logprobs(
    server: ModelServer, name: str, rows: Sequence[ProbeRow]
) -> list[list[float]]:
    return [(await server.prompt_logprobs(name, row.ids))[-len(row.logprobs) :] for row in rows]
