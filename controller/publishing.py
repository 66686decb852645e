"""Publish the versions that trainers have written: load and probe each, then promote or reject it.

A version is rejected if it is too far from its base model, if a server refuses it, or if one serves
it differently from the trainer. Then the serving version keeps the traffic. While no server
answers, its files are not there as written, or a server has another base model, the version stays
`written`, and is tried again. What is probed is `loaded`; it gets the traffic at once unless its
rule asks for a decision (`controller.gate`) or it waits for other policies' versions.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from controller.metrics import PROBE_DIFFERENCE
from controller.reconciler import base_models, load_version, unload_if_possible
from store.errors import RolledBack, StateChanged
from store.schema.tables import KL_TO_BASE
from store.version_queries import groups_to_promote, newest_written, numbered_version
from store.version_states import Why, lock_policies, make_loaded, promote_together, set_state
from store.versions import PolicyVersion
from trainer.errors import FilesAltered, FilesUnread, PublishError, UpstreamAway, WrongBase
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.publishing.probe import ProbeResult

log = structlog.get_logger()

# The recorded reason for which a version becomes `loaded`.
PROBED_REASON: Final = "it is loaded, and served as it was trained"
# Seconds of pause after a version's first try that decided nothing; each further one doubles it.
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 15.0
# Seconds for which a look waits for its tries.
TRY_S: Final = 5.0


class Publishing:
    """Publish the newest written version of each policy.

    Attributes:
        waiting: by served name, why a written version could be neither loaded nor rejected yet.
    """

    def __init__(self, servers: Replicas) -> None:
        self._servers = servers
        self.waiting: dict[str, str] = {}
        # For each such version: when to try again, and the pause before that.
        self._pauses: dict[str, tuple[float, float]] = {}
        # Running tries by policy: a slow server or source delays no other policy's version.
        self._tries: dict[str, asyncio.Task[None]] = {}
        # Served names of versions that are left to other controllers, and logged as such.
        self._left: set[str] = set()

    async def look(self, engine: AsyncEngine) -> None:
        """Publish what is written, and promote what has waited for other policies' versions.

        Tries that take longer than TRY_S go on until the next look.
        """
        async with engine.connect() as connection:
            written = await newest_written(connection)
        names = {version.served_name for version, _ in written}
        self.waiting = {name: why for name, why in self.waiting.items() if name in names}
        self._pauses = {name: pause for name, pause in self._pauses.items() if name in names}
        self._left &= names
        for version, base in written:
            if version.name not in self._tries:
                work = self._try_to_publish(engine, version, base)
                self._tries[version.name] = asyncio.create_task(work)
        if self._tries:
            await asyncio.wait(self._tries.values(), timeout=TRY_S)
        ended = [self._tries.pop(name) for name, task in list(self._tries.items()) if task.done()]
        async with engine.connect() as connection:
            groups = await groups_to_promote(connection)
        for together in groups:
            async with engine.begin() as connection:
                promoted = await promote_together(connection, together)
            log_promoted(promoted)
        for task in ended:
            # One that failed is raised last: it concerns no other policy.
            task.result()

    async def close(self) -> None:
        """End the tries that still run."""
        for task in self._tries.values():
            task.cancel()
        await asyncio.gather(*self._tries.values(), return_exceptions=True)

    async def _try_to_publish(self, engine: AsyncEngine, version: PolicyVersion, base: str) -> None:
        """Publish a version of a policy of the model `base`, unless it pauses after a failure."""
        name, clock = version.served_name, asyncio.get_running_loop().time
        again_at, before_s = self._pauses.get(name, (0.0, 0.0))
        if clock() < again_at:
            return
        try:
            await self._publish(engine, version, base)
        except (UpstreamAway, FilesAltered, FilesUnread, WrongBase) as error:
            pause_s = min(LONGEST_PAUSE_S, 2 * before_s or FIRST_PAUSE_S)
            self._pauses[name] = clock() + pause_s, pause_s
            if self.waiting.get(name) != str(error):
                log.warning("version_waits", version=name, reason=str(error))
            self.waiting[name] = str(error)
        except (StateChanged, RolledBack) as error:
            # A roll-back or a retraining took it down meanwhile, or another controller was faster.
            log.info("version_changed_meanwhile", version=name, reason=str(error))
            async with engine.connect() as connection:
                current = await numbered_version(connection, version.name, version.version)
            if current is None or not current.is_servable:
                await self._unload(name)

    async def _publish(self, engine: AsyncEngine, version: PolicyVersion, base: str) -> None:
        """Load a version on the servers that answer, probe it there, and promote or reject it.

        If all servers answer, and none has the model `base`, it is left to another controller.

        Raises:
            UpstreamAway, FilesAltered, FilesUnread, WrongBase: nothing is known about the version.
            StateChanged, RolledBack: it is not `written` any more.
        """
        listed = await self._servers.ask(ModelServer.models)
        servers = [server for server, models in listed.items() if base in base_models(models)]
        if not servers and len(listed) < len(self._servers.each):
            raise UpstreamAway(f"no model server that answers has the base model {base!r}")
        if not servers:
            if version.served_name not in self._left:
                self._left.add(version.served_name)
                missing = f"no model server of this controller has its base model {base!r}"
                log.warning("version_left", version=version.served_name, reason=missing)
            return
        try:
            check_forgetting(version)
            probes = await self._servers.ask(
                lambda server: load_and_probe(server, version), servers
            )
        except (FilesAltered, WrongBase):
            raise
        except PublishError as error:
            await self._reject(engine, version, error)
            return
        probe = max(probes.values(), key=lambda probe: probe.mean_difference)
        evidence = msgspec.structs.asdict(probe)
        why: Why = {"reason": PROBED_REASON, "actor": "controller", "evidence": evidence}
        async with engine.begin() as connection:
            # Read again: the trainer may have begun anew with other policies that go live together.
            current = await numbered_version(connection, version.name, version.version) or version
            together = (current.gate or {}).get("publish_with", [version.name])
            await lock_policies(connection, together)
            await make_loaded(connection, version.name, version.version, **why)
            promoted = await promote_together(connection, together)
        PROBE_DIFFERENCE.labels(version.name).set(probe.mean_difference)
        log.info("version_probed", version=version.served_name, **evidence)
        log_promoted(promoted)

    async def _reject(
        self, engine: AsyncEngine, version: PolicyVersion, error: PublishError
    ) -> None:
        async with engine.begin() as connection:
            await set_state(
                connection,
                version.name,
                version.version,
                "rejected",
                reason=str(error),
                actor="controller",
                evidence=error.evidence,
            )
        log.error("version_rejected", version=version.served_name, reason=str(error))
        await self._unload(version.served_name)

    async def _unload(self, name: str) -> None:
        for server in self._servers.each:
            await unload_if_possible(server, name)


async def load_and_probe(server: ModelServer, version: PolicyVersion) -> ProbeResult:
    """Load a version on a server (`load_version`), and return what its probe found.

    Raises:
        PublishError: its files have nothing to compare with.
    """
    probe = await load_version(server, version)
    if probe is None:
        raise PublishError("its manifest has no probe rows, so nobody can tell how it is served")
    return probe


def log_promoted(versions: Sequence[PolicyVersion]) -> None:
    """Log the versions that have got the traffic."""
    for version in versions:
        log.info("version_promoted", version=version.served_name)


def check_forgetting(version: PolicyVersion) -> None:
    """Check a version's KL to the base model against the bound of its rule, if both exist.

    An imported version has no KL, because Pawl did not train it.

    Raises:
        PublishError: the KL is above the bound.
    """
    kl, most = version.kl_to_base, (version.gate or {}).get("most_kl_to_base")
    if kl is None or most is None or kl <= most:
        return
    raise PublishError(
        f"its KL to the base model is {kl:.4g} nats a token on its training data, and"
        f" publish.most_kl_to_base is {most:g}: it may have lost other skills; set"
        " kl.coefficient, lower optimizer.learning_rate, or raise the bound",
        {KL_TO_BASE: kl, "most_kl_to_base": most},
    )
