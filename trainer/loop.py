"""Run one update after the other: claim, credit, train, write, record, publish.

Each episode is trained exactly once (docs/decisions/024-exactly-once.md and 024-exactly-once.md). A
claim lives in the database; a version exists from the moment its folder is renamed into
place; its episodes are consumed in the transaction that records it. What a kill leaves
unfinished is finished or undone by `trainer.updates.recovery`.

An update depends on no clock, no generated id and no chance: the same claim gives the same
version, bit by bit, however often it is begun.
"""

import asyncio
from time import perf_counter
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store.errors import ClaimSpoilt
from store.updates import signal
from store.updates.claims import Claim
from store.updates.faults import note_fault
from store.versions import PolicyVersion
from trainer.errors import LearnerError, ServerAtFault, ShortOfMemory, Unusable
from trainer.learners.protocol import LearnerProtocol
from trainer.metrics import UPDATE_SECONDS, show_hold
from trainer.publishing.adapters import NewVersion, version_folder
from trainer.publishing.pacing import Pacing
from trainer.publishing.publisher import Publisher
from trainer.recipes.recipe import Recipe
from trainer.settings import TrainerSettings
from trainer.updates.claiming import Claiming
from trainer.updates.expiring import Expiring
from trainer.updates.holding import Holding, HoldReason, looks_like_a_fault
from trainer.updates.plan import Plan, claim_rule
from trainer.updates.planning import Planning
from trainer.updates.recording import Recording
from trainer.updates.recovery import Recovery
from trainer.updates.training import Training
from trainer.updates.trial import Trial
from trainer.updates.versions import Versions

log = structlog.get_logger()

NO_SLOT: Final = (
    "all adapter slots of the model server are taken by versions with traffic, so it cannot be"
    " tried before one is free; no update could begin before that either"
)


class Loop:
    """Run the updates of one policy, one after the other."""

    def __init__(
        self,
        settings: TrainerSettings,
        recipe: Recipe,
        engine: AsyncEngine,
        publisher: Publisher,
        learner: LearnerProtocol,
        policy: str,
        holding: Holding | None = None,
    ) -> None:
        """Connect the stages of an update; `policy` is the name of the policy in training.

        `holding` outlives the loop, which ends with a connection to the database.
        """
        self._folder = settings.adapter_dir
        self._recipe = recipe
        self._policy = policy
        self._publisher = publisher
        rule, recorded_recipe = claim_rule(recipe, policy), recipe.model_dump(mode="json")
        self._engine, self._rule = engine, rule
        slots, together, known = settings.adapter_slots, publisher.together, publisher.known
        pacing = self._pacing = Pacing(
            publisher.servers, policy, slots, recipe, together, known=known
        )
        self._claiming = Claiming(engine, rule, recorded_recipe, pacing)
        self._expiring = Expiring(engine, rule, recorded_recipe)
        self._versions = Versions(engine, self._folder, policy)
        self._training = Training(learner, self._folder, self._versions)
        self._planning = Planning(self._training, recipe, self._try_servers)
        self._recording = Recording(engine, policy)
        self._holding = holding or Holding()
        folder = version_folder(self._folder, policy, 0).parent
        self._trial = Trial(learner, folder, publisher.servers, policy, recipe)
        self._recovery = Recovery(engine, self._folder, policy, self._versions, self._recording)

    async def finish_killed(self) -> None:
        """Finish or abandon the update that a killed trainer left.

        Raises:
            AdapterError: a version's files are missing or differ from its manifest.
        """
        await self._recovery.finish("the trainer was killed")

    async def recover(self) -> None:
        """Finish or abandon the update that a killed trainer left, and publish what it had written.

        While it is in doubt whether the servers serve as meant, that waits for their trial.

        Raises:
            AdapterError: a version's files are missing or differ from its manifest.
        """
        await self.finish_killed()
        await self._publisher.clean(self._folder)
        if not self._holding.is_in_doubt:
            await self._recovery.publish_written(self._publisher)
        # What got the traffic now needs less of the versions before it.
        await self._publisher.clean(self._folder)

    async def check_server(self) -> None:
        """Try whether the model servers would serve a version as meant.

        Where memory is short, or all adapter slots are taken, the trainer holds, and tries again
        until it knows.

        Raises:
            PublishError: one would not; the message says why, and what to do.
            UpstreamAway: none answers.
        """
        if not await self._has_room():
            self._holding.doubt(NO_SLOT, "no_slot")
            self._tell_if_held()
            return
        try:
            await self._trial.check()
        except ShortOfMemory as error:
            self._holding.doubt(str(error), "out_of_memory")
            self._tell_if_held()
        else:
            self._holding.settle()
            self._holding.tried_at = self._publisher.servers.returns

    async def try_again(self) -> None:
        """Try whether updates could go on, if the trainer holds and it is time to.

        Raises:
            UpstreamAway: no model server answers.
        """
        if self._holding.trial_is_due and await self._has_room():
            in_doubt = self._holding.is_in_doubt
            why = await (self._trial.why_unserved() if in_doubt else self._trial.why_not())
            self._holding.tried_at = self._publisher.servers.returns
            self._holding.note_trial(why)
            if why is None:
                await self._set_aside()
            if why is None and in_doubt:
                await self._recovery.publish_written(self._publisher)
            log.warning("trial", policy=self._policy, passed=why is None, reason=why)
        show_hold(self._policy, self._holding.kind)

    async def _has_room(self) -> bool:
        """Return whether the model servers have a slot for a trial's adapter.

        Without one no update could be claimed either.
        """
        async with self._engine.begin() as connection:
            return await self._pacing.has_room(connection)

    async def sync_adapters(self) -> None:
        """Load the adapters that the store lists as servable, and unload those that are retired.

        Versions that have waited for others to go live with go live. Once a replica is back, the
        trainer holds until it is tried: its base model may be another one.
        """
        await self._publisher.reconcile()
        if self._publisher.servers.returns != self._holding.tried_at:
            self._holding.doubt("a model server was away, and may be another one now")
        await self._publisher.go_live()
        await self._publisher.retire_idle()

    async def waiting_updates(self) -> float:
        """Return how many updates could be made of the signal that waits for the policy."""
        async with self._engine.connect() as connection:
            return await signal.waiting_updates(connection, self._rule)

    async def update_once(self) -> bool:
        """Run one update if enough episodes are ready; return whether there was one.

        If it is cancelled, a version that exists already is recorded; else the episodes are free.
        """
        started = perf_counter()
        if await self._versions.waits_to_go_live():
            # An update made now would not build on that version.
            return False
        # Only after the look above: another trainer may let this policy's version go live, and this
        # one alone makes any wait.
        parent = await self._parent()
        await self._expiring.expire(parent.version)
        try:
            if not await self._update_from(parent):
                return False
        except asyncio.CancelledError:
            await self._recovery.finish_if_possible("the trainer was stopped")
            raise
        UPDATE_SECONDS.labels(self._policy).observe(perf_counter() - started)
        return True

    async def _parent(self) -> PolicyVersion:
        """Return the version to train on from: with a gate, training goes on while that decides."""
        if self._recipe.gate.is_gated:
            return await self._versions.head()
        return await self._versions.serving()

    async def _update_from(self, parent: PolicyVersion) -> bool:
        """Claim until an update of `parent` comes to its end; return False if too few are ready."""
        while not self._holding.is_held:
            claim = await self._claiming.take(parent.version)
            if claim is None:
                return False
            try:
                await self._run(claim, parent)
            except LearnerError as error:
                await self._claiming.undo(claim.update_id, error)
                await self._weigh(error, claim)
            except ClaimSpoilt as error:
                await self._recovery.give_up(claim.update_id, str(error))
                parent = await self._parent()
            else:
                return True
        return False

    async def _weigh(self, error: LearnerError, claim: Claim) -> None:
        """Count an update that failed, unless the next one can do without what made it fail.

        Rows that a server sampled wrongly may be from before a repair: the servers are asked.
        """
        if error.is_poison and not _is_of_most(error, claim):
            return
        why: str | None = str(error)
        if error.doubts_servers:
            self._holding.note_drift()
            why = await self._trial.why_unserved()
        if why is None:
            await self._set_aside()
            self._holding.note_past_fault(str(error))
            self._tell_if_held()
        else:
            self._note_failure(why, _hold_reason(error))

    async def _set_aside(self) -> None:
        """Set aside what was sampled before now, where the servers are right now and were not.

        Else one update after the other would spend its share of it.
        """
        if self._holding.sampled_wrongly:
            async with self._engine.begin() as connection:
                episodes = await note_fault(connection, self._policy)
            log.warning("episodes_set_aside", policy=self._policy, episodes=episodes)

    def _note_failure(self, why: str, kind: HoldReason) -> None:
        """Count an update that came to nothing, and hold after some in a row."""
        self._holding.note_failure(why, kind)
        self._tell_if_held()

    def _tell_if_held(self) -> None:
        why = self._holding.reason
        if why is not None:
            show_hold(self._policy, self._holding.kind)
            log.error("trainer_holds", policy=self._policy, reason=why)

    async def _run(self, claim: Claim, parent: PolicyVersion) -> None:
        """Bring a claim to its end: a version, or none if there is no signal or training fails.

        Raises:
            LearnerError: it cannot be computed; the claim still runs.
        """
        number = await self._versions.next_number()
        plan = await self._planning.plan(claim, parent.version)
        log.info("update_begun", update=str(claim.update_id), version=number, **plan.metrics)
        if not plan.rows:
            await self._recording.without_version(claim, plan)
            return
        await self._make_version(claim, plan, parent, number)

    async def _try_servers(self, far: int, measured: int) -> None:
        """Try the model servers before so many episodes are spent as too far off the policy.

        Raises:
            ServerAtFault: one may have sampled them wrongly.
        """
        why = await self._trial.why_unserved()
        if why is not None:
            self._holding.note_drift()
            raise ServerAtFault(
                f"{far} of {measured} episodes are too far off the policy, and a model server is at"
                f" fault: {why}"
            )
        log.warning("many_episodes_off_policy", policy=self._policy, far=far, measured=measured)

    async def _make_version(
        self, claim: Claim, plan: Plan, parent: PolicyVersion, number: int
    ) -> None:
        """Train, write, record and publish version `number`."""
        trained = await self._training.train(parent.version, plan.rows, plan.step_share)
        probe = await self._training.probe()
        metrics = plan.metrics | trained
        new = NewVersion(
            policy=self._policy,
            version=number,
            update_id=claim.update_id,
            parent_version=parent.version,
            outcomes=plan.outcomes,
            metrics=metrics,
            probe=probe,
            baselines=plan.baselines,
        )
        folder = await self._training.write(new)
        await self._recording.with_version(claim, plan, metrics, number, folder)
        version = await self._versions.numbered(number)
        why = await self._recovery.publish(self._publisher, version, probe)
        if why is not None:
            self._note_failure(why, "rejected")
        elif (await self._versions.numbered(number)).state == "written":
            self._holding.note_written()
        else:
            self._holding.note_success()
        await self._publisher.clean(self._folder)


def _is_of_most(error: LearnerError, claim: Claim) -> bool:
    """Return whether most of a claim's episodes are to blame: then it is hardly their doing."""
    members = sum(len(group.episodes) for group in claim.groups)
    return isinstance(error, Unusable) and looks_like_a_fault(len(error.episodes), members)


def _hold_reason(error: LearnerError) -> HoldReason:
    """Return in a word what the trainer holds for, if an update failed and it does."""
    if error.doubts_servers or isinstance(error, ServerAtFault):
        return "server"
    return "out_of_memory" if isinstance(error, ShortOfMemory) else "failed"
