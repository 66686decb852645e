"""Judge the versions of policies with a gate by what their episodes came to, and move the traffic.

A look is one transaction: what a decision rests on is read, and the states are changed with their
events, by one steward at a time. So a kill, or a database that goes away, leaves nothing half done,
and several stewards decide what one would. It needs no trainer, and a model server only to load
what serves again after a roll-back, and, between looks, to have a candidate answer recorded calls.
"""

import asyncio
from functools import partial

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.database import open_engine
from pawl.steward.evidence import one_look
from pawl.steward.metrics import GATE_MOVES, GATE_WATCHED
from pawl.steward.policy_gate import STEWARD, PolicyGate
from pawl.steward.replay.replaying import Replays
from pawl.steward.rollback import Loaded, RollbackTarget, load_again, make_room
from store.database import is_unavailable
from store.read.standing import gated_policies, unruled_policies
from store.settings import StoreSettings
from trainer.publishing.model_server import Replicas

log = structlog.get_logger()


class Gating:
    """Judge each policy with a gate, again and again."""

    def __init__(
        self,
        settings: StoreSettings,
        poll_s: float,
        replicas: Replicas,
    ) -> None:
        """Store where the database is, the pause between two looks, and the model servers."""
        self._settings = settings
        self._poll_s = poll_s
        self._replicas = replicas
        self._policies: dict[str, PolicyGate] = {}
        self.replays = Replays(replicas)
        # What keeps all policies from being judged, and which of them was looked at then.
        self._trouble: str | None = None
        self._put_off: str | None = None
        self._unruled: set[str] = set()

    async def follow(self) -> None:
        """Look again and again; never return. `Known` tells whether the database is there."""
        while True:
            try:
                async with (
                    open_engine(self._settings) as engine,
                    self.replays.going_on(engine, self._poll_s),
                ):
                    while True:
                        await self.look(engine)
                        self._trouble = None
                        await asyncio.sleep(self._poll_s)
            except Exception as error:
                # What is known of the episodes stays, and the next look goes on from there.
                self._note(error)
            await asyncio.sleep(self._poll_s)

    def _note(self, error: Exception) -> None:
        """Log why no policy is judged, once for as long as it stays so."""
        is_away = is_unavailable(error)
        trouble = "gate_waits_for_database" if is_away else "gate_fails"
        if trouble != self._trouble:
            tell = log.warning if is_away else log.exception
            tell(trouble, reason=f"{type(error).__name__}: {error}"[:200])
        self._trouble = trouble

    async def look(self, engine: AsyncEngine) -> None:
        """Judge every policy once; what fails in one hinders no other.

        One that was looked at as the database went away comes last: it may be its own look that the
        database ends, as one that is too long for it.

        Raises:
            Exception: the database is away.
        """
        async with engine.connect() as connection:
            names = await gated_policies(connection)
            unruled = await unruled_policies(connection) - set(names)
        for name in self._policies.keys() - set(names):
            self._policies.pop(name).forget()
        self._show_unruled(unruled)
        for name in sorted(names, key=lambda one: one == self._put_off):
            policy = self._policies.setdefault(name, PolicyGate(name, self.replays))
            self._put_off = name
            try:
                await self._judge(engine, policy)
            except Exception as error:
                if is_unavailable(error):
                    raise
                policy.failed(error)
                continue
            policy.failed(None)
        self._put_off = None

    def _show_unruled(self, names: set[str]) -> None:
        """Show the policies that nothing is watched of, as there is no rule to judge them by."""
        for name in self._unruled - names:
            if name not in self._policies:
                GATE_WATCHED.remove(name)
        for name in names:
            GATE_WATCHED.labels(name).set(0)
        self._unruled = names

    async def _judge(self, engine: AsyncEngine, policy: PolicyGate) -> None:
        """Judge one policy; if what is to serve again must be loaded, load it, and judge again."""
        loaded: Loaded | None = None
        for _ in range(2):
            moved = await one_look(engine, partial(policy.judge, loaded=loaded))
            # Only now is it so.
            for version, to, reason in moved:
                GATE_MOVES.labels(version.name, to).inc()
                log.info("gate_moved", version=version.served_name, to=to, reason=reason)
                if to == "serving" and version.state == "canary":
                    log.info("version_promoted", version=version.served_name)
            if policy.before is None:
                return
            await make_room(engine, self._replicas, policy.before.version, STEWARD)
            loaded = await _loaded(self._replicas, policy.before)


async def _loaded(replicas: Replicas, before: RollbackTarget) -> Loaded:
    """Load what is to serve again, and log why it could not be loaded."""
    loaded = await load_again(replicas, before)
    if loaded.why_not is not None:
        name = before.version.served_name
        log.error("adapter_not_loaded", version=name, reason=loaded.why_not)
    return loaded
