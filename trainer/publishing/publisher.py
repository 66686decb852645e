"""Publish a written version: load it, probe it, and promote it, or let it wait for that.

A version that has gone too far from its base model, does not load or fails the probe is rejected,
and the one before keeps the traffic. With a gate one that passes becomes a candidate,
which the controller tries on live traffic.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store import version_queries, version_states
from store.errors import StateChanged
from store.read.gates import gated, newest_promoted
from store.schema.tables import KL_TO_BASE, MOST_KL_TO_BASE
from store.version_states import change_state, lock_policies, set_state
from store.versions import UNSERVED, PolicyVersion
from trainer.errors import FailedProbe, PublishError, TooFar
from trainer.metrics import UPDATE, UPDATES, VERSION
from trainer.publishing.adapters import check_files
from trainer.publishing.cleaning import Cleaning
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.publishing.probe import ProbeResult, ProbeRow, compare, rejection_reason
from trainer.publishing.reconciler import Reconciler, served_logprobs
from trainer.recipes.recipe import GateOptions, PublishOptions

log = structlog.get_logger()

# All proxies know of a change after this long; they read the policies twice a second.
PROXY_REFRESH_S: Final = 10.0
# Why a version gets out of the state `written`, as its events say.
PROBED: Final = "it is loaded, and served as it was trained"

NOT_TRIED: Final = (
    "the candidate before it made way for it, and no version was tried meanwhile: let a `pawl"
    " controller` run, which tries them, and see its log; if it replays, lower"
    " gate.replay_states or raise gate.updates_per_candidate"
)


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
        gate: GateOptions | None = None,
    ) -> None:
        """Store the model servers, the policy's name and the recipe's `[publish]` rule.

        `together` are the policies that must go live together, this one among them, if any must;
        `known` are all that are configured (None: all that have versions). `gate` is the recipe's,
        None: a version serves at once.
        """
        self._engine = engine
        self.servers = servers
        self._policy = policy
        self._rule = rule
        self.together = tuple(together) or (policy,)
        self.known = known
        self.gate = gate or GateOptions()
        self._reconcilers = {server: Reconciler(server) for server in servers.each}

    async def publish(
        self,
        version: PolicyVersion,
        before: str,
        rows: Sequence[ProbeRow],
    ) -> ProbeResult:
        """Load `version` and probe it on the replicas that answer, and promote it.

        It is promoted once all are ready that must go live together; with a gate it becomes a
        candidate instead.

        `before` is the served name of the version that has the traffic now.

        Raises:
            PublishError: the version was rejected; nothing changes for any request.
            UpstreamAway: no server answers; the version stays `written`.
            FilesUnread: its files cannot be read for now; the version stays `written`.
        """
        assert version.adapter_path is not None
        # A replica may have been restarted since: the probe asks it for `before`, too.
        await self.reconcile()
        try:
            check_forgetting(version, self.gate)
            await check_files(version)
            loaded = await self.servers.load(
                version.served_name, Path(version.adapter_path), version.manifest_sha256
            )
            probe = await self._probe(loaded, version.served_name, before, rows)
        except PublishError as error:
            await self._reject(version, error)
            await self.servers.unload(version.served_name)
            log.error("version_rejected", version=version.served_name, reason=str(error))
            raise
        await self._admit(version)
        return probe

    async def _admit(self, version: PolicyVersion) -> None:
        """Let a version that passed the probe go live, or wait for others or for its trial.

        Raises:
            PublishError: what it was trained from was rolled back meanwhile.
        """
        promoted: list[PolicyVersion] = []
        async with self._engine.begin() as connection:
            # All at once: the trainer of another of them may let them go live at this moment.
            await lock_policies(connection, self.together)
            lost = await version_states.reject_orphan(connection, self._policy, version.version)
            if lost is None and self.gate.is_gated:
                await self._make_candidate(connection, version)
            elif lost is None:
                await self._let_watch(connection, version)
                await version_states.make_ready(
                    connection, self._policy, version.version, reason=PROBED, actor="trainer"
                )
                promoted = await self._promote(connection)
        if lost is not None:
            await self.servers.unload(version.served_name)
            log.error("version_rejected", version=version.served_name, reason=lost)
            raise PublishError(lost)
        if self.gate.is_gated:
            log.info("version_is_candidate", version=version.served_name)
        elif not promoted:
            log.info("version_ready", version=version.served_name, goes_with=self.together)
        self._show_promoted(promoted)

    async def _let_watch(self, connection: AsyncConnection, version: PolicyVersion) -> None:
        """Let the controller watch over a version that serves untried, if the recipe says so."""
        if self.gate.is_watched:
            rule = self.gate.model_dump(mode="json")
            share = self.gate.base_share
            await version_states.watch(connection, self._policy, version.version, rule, share)
        else:
            await version_states.end_base_share(connection, self._policy)

    async def _make_candidate(self, connection: AsyncConnection, version: PolicyVersion) -> None:
        """Let the controller try a version, by the rule of the recipe, which it cannot read."""
        rule = self.gate.model_dump(mode="json")
        made_way = await version_states.make_candidate(
            connection, self._policy, version.version, rule, reason=PROBED
        )
        stands = await gated(connection, self._policy)
        if made_way and stands is not None and stands.canary is None and not stands.frozen:
            log.warning("candidate_was_not_tried", version=version.served_name, remedy=NOT_TRIED)

    async def go_live(self) -> None:
        """Promote what is ready, if all that go live together are, or have waited long enough.

        It is one transaction, and proxies read all versions at once: no new episode gets a new
        version of one policy and the old one of another. Whichever trainer comes first does it.
        What others promoted, such as a controller, is shown too.
        """
        async with self._engine.begin() as connection:
            promoted = await self._promote(connection)
            newest = await newest_promoted(connection, self._policy)
        self._show_promoted(promoted)
        VERSION.labels(self._policy).set(newest)

    async def _promote(self, connection: AsyncConnection) -> list[PolicyVersion]:
        wait_s = self._rule.wait_for_others_s
        return await version_states.promote_together(connection, self.together, wait_s)

    def _show_promoted(self, promoted: Sequence[PolicyVersion]) -> None:
        for version in promoted:
            VERSION.labels(version.name).set(version.version)
            log.info("version_promoted", version=version.served_name)

    async def try_to_publish(
        self, version: PolicyVersion, before: str, rows: Sequence[ProbeRow]
    ) -> str | None:
        """Publish `version` if it is served correctly; else the one before keeps the traffic.

        Return why it was rejected, or None. The result is counted and logged. The arguments are
        those of `publish`.
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
        served = await served_logprobs(server, name, rows)
        other = await self._other_than(server, name, before)
        probe = compare(served, trained, await served_logprobs(server, other, rows))
        reason = rejection_reason(probe, self._rule.tolerance)
        if reason is not None:
            raise FailedProbe(reason)
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

    async def _reject(self, version: PolicyVersion, error: PublishError) -> None:
        """Reject a version, with what else of its candidate that is about, in one transaction."""
        why, evidence = str(error), error.evidence
        async with self._engine.begin() as connection:
            if error.is_learned:
                most = self.gate.most_kl_to_base if isinstance(error, TooFar) else None
                await version_states.reject_with_chain(
                    connection, version, most, reason=why, evidence=evidence
                )
                return
            number = version.version
            await set_state(
                connection, self._policy, number, "rejected", reason=why, actor="trainer"
            )

    async def reconcile(self) -> None:
        """Let every replica have the adapters that it should, and take retired ones from it.

        The controller does so, too, whether a trainer runs or not. Retired versions are taken from
        the proxies first and, once all proxies know, from the model servers. The files stay until
        `clean`: vLLM's engine dies over a missing folder.
        """
        async with self._engine.connect() as connection:
            servable = await version_queries.list_servable(connection, self._policy)
            unserved = await version_queries.idle_versions(
                connection, self._policy, UNSERVED, PROXY_REFRESH_S
            )
        await self.servers.ask(
            lambda server: self._reconcilers[server].look(
                servable, unserved, is_unserved=self._is_unserved
            )
        )

    async def retire_idle(self) -> None:
        """Retire versions that lost the traffic, once no episode has used them for a while."""
        idle_s = self._rule.retire_after_s
        async with self._engine.connect() as connection:
            idle = await version_queries.idle_versions(
                connection, self._policy, ("published", "rolled_back"), idle_s
            )
        why = f"it lost the traffic, and no episode has used it for {idle_s:g} s"
        for version in idle:
            try:
                async with self._engine.begin() as connection:
                    await change_state(connection, version, "retired", reason=why, actor="trainer")
            except StateChanged as error:
                # The controller or a person gave it the traffic meanwhile.
                log.info("version_not_retired", version=version.served_name, reason=str(error))

    async def _is_unserved(self, version: PolicyVersion) -> bool:
        """Return whether a version is still not to be served.

        Servers may answer slowly, and the controller call a version back meanwhile.
        """
        async with self._engine.connect() as connection:
            now = await version_queries.numbered_version(connection, self._policy, version.version)
        return now is not None and now.state in UNSERVED

    async def clean(self, root: Path) -> None:
        """Delete the files below `root` that nothing can ask for any more."""
        idle_s = self._rule.retire_after_s
        await Cleaning(self._engine, self.servers, self._policy, root, idle_s).clean()


def is_too_far(version: PolicyVersion, gate: GateOptions) -> bool:
    """Return whether a version's KL to the base model is above the recipe's bound.

    Of an import there is none: it was trained on nothing here.
    """
    kl, most = version.kl_to_base, gate.most_kl_to_base
    return kl is not None and most is not None and kl > most


def check_forgetting(version: PolicyVersion, gate: GateOptions) -> None:
    """Check a version's KL to the base model against the recipe's bound, if there are both.

    Raises:
        TooFar: it is above the bound.
    """
    if not is_too_far(version, gate):
        return
    kl, most = version.kl_to_base, gate.most_kl_to_base
    raise TooFar(
        f"its KL to the base model is {kl:.4g} nats a token on what it was trained on, and"
        f" gate.most_kl_to_base is {most:g}: it may have forgotten what it was not trained on; set"
        " kl.coefficient, lower optimizer.learning_rate, or raise the bound",
        {KL_TO_BASE: kl, MOST_KL_TO_BASE: most},
    )
