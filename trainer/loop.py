"""Run one update after the other: claim, plan, train, write, record.

Each episode is trained exactly once (docs/decisions/024-exactly-once.md). A
claim lives in the database; a version exists from the moment its folder is renamed into
place; its episodes are consumed in the transaction that records it. What a kill leaves
unfinished is finished or undone by `trainer.updates.recording`. A recorded version is `written`:
the controller loads, probes and promotes it, or rejects it. No further update is trained before.

An update depends on no clock, no generated id and no chance: the same claim gives the same
version, bit by bit, however often it is begun.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claim_query, claims
from store.claim_query import exclude_after_fault
from store.claims import Claim
from store.errors import ClaimSpoilt
from store.read.evaluations import Evaluation, rewards_by_version
from store.read.gates import newest_promoted
from store.versions import PolicyVersion
from trainer.errors import (
    MEMORY_REMEDY,
    LearnerError,
    ServerAtFault,
    ShortOfMemory,
    TeacherError,
    Unusable,
)
from trainer.learners.protocol import LearnerProtocol
from trainer.metrics import TRAINED_VERSION, UPDATE_SECONDS, UPDATES, show_pause
from trainer.publishing.adapters import version_folder
from trainer.publishing.cleaning import Cleaning
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.publishing.pacing import Pacing
from trainer.recipes.recipe import Recipe
from trainer.settings import TrainerSettings
from trainer.trackers import Trackers
from trainer.updates.circuit_breaker import CircuitBreaker, PauseReason, looks_like_a_fault
from trainer.updates.claiming import EXPIRE_S, Claiming, claim_rule
from trainer.updates.plan import Plan
from trainer.updates.recording import KILLED, Recording, Recovery
from trainer.updates.self_test import ServerSelfTest
from trainer.updates.teacher import Teacher
from trainer.updates.training import Training, in_thread
from trainer.updates.versions import (
    PUBLISHED_WITHIN_S,
    PolicyVersions,
    publishing_rule,
    warn_of_wait,
)

log = structlog.get_logger()

NO_SLOT: Final = (
    "all adapter slots of the model server are taken by versions with episodes under way, so it"
    " cannot be tested before a slot is free; no update could begin before that either"
)
# Seconds between checks that model servers still answer.
SERVER_CHECK_S: Final = 5.0


class Loop:
    """Run the updates of one policy, one after the other."""

    def __init__(
        self,
        settings: TrainerSettings,
        recipe: Recipe,
        engine: AsyncEngine,
        servers: Replicas,
        learner: LearnerProtocol,
        policy: str,
        *,
        together: Sequence[str] = (),
        known: Sequence[str] | None = None,
        breaker: CircuitBreaker | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        """Connect the stages of an update; `policy` is the name of the policy in training.

        `together` are the policies that must go live together, this one included (empty: none), and
        `known` the configured policies (None: all that have versions). `breaker` and `trackers`
        outlive the loop, which ends when its database connection is lost.
        """
        folder = settings.adapter_dir
        self._engine, self._recipe, self._policy = engine, recipe, policy
        self._servers = servers
        self._together = tuple(together) or (policy,)
        self._rule = claim_rule(recipe, policy)
        self._pacing = Pacing(servers, policy, recipe, self._together, known=known)
        self._claiming = Claiming(engine, self._rule, recipe.model_dump(mode="json"), self._pacing)
        self._versions = PolicyVersions(engine, folder, policy)
        key, probe = settings.teacher_api_key, learner.vocabulary_probe
        teacher = Teacher(recipe.teacher, probe, key) if recipe.teacher else None
        self._learner = learner
        self._training = Training(learner, folder, self._versions, teacher, servers.files)
        rule = publishing_rule(recipe, policy, self._together)
        self._recording = Recording(engine, policy, rule)
        self._recovery = Recovery(self._recording, folder)
        self._cleaning = Cleaning(engine, servers, policy, folder)
        self._breaker = breaker or CircuitBreaker()
        self._trackers = trackers or Trackers((), folder, {})
        # The last tracked evaluation, and the time of the last query for a newer one.
        self._evaluated: Evaluation | None = None
        self._looked_at = -EXPIRE_S
        # Time of the next check that model servers answer.
        self._ask_at = 0.0
        # The version that the controller has still to publish, and since when it is awaited.
        self._awaited: PolicyVersion | None = None
        self._awaited_since = 0.0
        self._is_wait_logged = False
        # The next update, if it was claimed and planned while its parent was published.
        self._ahead: tuple[Claim, Plan] | None = None
        # Or why it failed.
        self._failed_ahead: tuple[LearnerError, Claim] | None = None
        own_folder = version_folder(folder, policy, 0).parent
        self._self_test = ServerSelfTest(learner, own_folder, servers, policy, recipe, teacher)

    async def finish_killed(self) -> None:
        """Finish or abandon the update that a killed trainer left.

        After two killed updates in a row, use smaller micro-batches: the kernel may have killed the
        trainers for lack of memory.
        """
        await self._recovery.finish(KILLED)
        async with self._engine.connect() as connection:
            killed = await claims.abandoned_in_a_row(connection, self._policy, KILLED)
        if killed > 1:
            halved = partial(self._learner.halve_micro_batches, killed - 1)
            tokens = await in_thread(self._learner, halved)
            log.error(
                "trainer_killed_again",
                policy=self._policy,
                updates=killed,
                reason=f"trainers were killed in {killed} updates in a row, maybe for lack of"
                f" memory (see the kernel's log): from now on micro-batches have {tokens} tokens",
                remedy=MEMORY_REMEDY,
            )

    async def recover(self) -> None:
        """Finish or abandon the update that a killed trainer left, and delete unneeded files."""
        await self.finish_killed()
        await self._cleaning.clean()

    async def check_server(self) -> None:
        """Test whether the model servers would serve a version correctly; if so, end a suspicion.

        If memory is short, a teacher cannot be used, or all adapter slots are taken, training
        pauses, and the test is repeated until it gives a result.

        Raises:
            PublishError: a server would not; the message says why, and what to do.
            UpstreamAway: no server answers.
        """
        if not await self._has_test_slot():
            self._breaker.pause_until_test(NO_SLOT, "no_slot")
            self._log_pause()
            return
        try:
            await self._self_test.check()
        except (ShortOfMemory, TeacherError) as error:
            self._breaker.pause_until_test(str(error), _pause_reason(error))
            self._log_pause()
        else:
            self._breaker.end_suspicion()
            self._breaker.tested_return_count = self._servers.return_count

    async def test_if_due(self) -> None:
        """If training is paused and a test is due, test whether updates could go on.

        If so, the pause ends, and samples of a server that was at fault are excluded.
        """
        breaker = self._breaker
        if breaker.test_is_due and await self._has_test_slot():
            is_suspect = breaker.suspects_servers
            test = self._self_test
            why = await (test.why_servers_fail() if is_suspect else test.why_update_fails())
            breaker.tested_return_count = self._servers.return_count
            breaker.apply_test_result(why)
            if why is None:
                await self._exclude_wrong_samples()
            log.warning("self_test", policy=self._policy, passed=why is None, reason=why)
        show_pause(
            self._policy, breaker.reason or ("unpublished" if self._is_wait_logged else None)
        )

    async def _has_test_slot(self) -> bool:
        """Return whether the model servers have a slot for a test's adapter.

        Without a free slot no update could be claimed either.
        """
        async with self._engine.begin() as connection:
            return await self._pacing.has_test_slot(connection)

    async def watch_servers(self) -> None:
        """Check that model servers answer, and show the newest promoted version.

        Once a replica is back, training pauses until it is tested: its base model may have changed.

        Raises:
            UpstreamAway: no server answers.
        """
        if self._servers.is_any_away or perf_counter() >= self._ask_at:
            await self._servers.ask(ModelServer.models)
            self._ask_at = perf_counter() + SERVER_CHECK_S
        if self._servers.return_count != self._breaker.tested_return_count:
            self._breaker.pause_until_test("a model server was away, and may be another one now")
        async with self._engine.connect() as connection:
            newest = await newest_promoted(connection, self._policy)
        TRAINED_VERSION.labels(self._policy).set(newest)

    async def stop(self) -> None:
        """Record the running update if its version exists, else free its episodes, if possible."""
        await self._recovery.finish_if_possible("the trainer was stopped")

    async def waiting_updates(self) -> float:
        """Return how many updates could be made of the signal that waits for the policy."""
        async with self._engine.connect() as connection:
            return await claim_query.waiting_updates(connection, self._rule)

    async def update_once(self, *, looks_ahead: bool = False) -> bool:
        """Run one update if enough episodes are ready; return whether there was one.

        If cancelled, a version that exists already is recorded; otherwise the episodes are freed.
        There is none before the controller has published the version of the one before. With
        `looks_ahead` the next update is claimed and planned meanwhile; the next call continues it,
        or frees its episodes.
        """
        if not await self.is_published():
            if self._breaker.is_open:
                await self._free_next_update()
            return False
        started = perf_counter()
        # A newer version would start the wait for other policies' versions again, maybe for ever.
        waits_for_others = len(self._together) > 1 and await self._versions.waits_to_go_live()
        if waits_for_others or await self._versions.is_held():
            await self._free_next_update()
            return False
        # Read after the checks above: meanwhile the controller may promote the waiting version, but
        # only this trainer makes a new one.
        parent = await self._versions.head()
        await self._claiming.consume_expired(parent.version)
        await self._track_evaluation()
        try:
            if not await self._update_from(parent):
                return False
            UPDATE_SECONDS.labels(self._policy).observe(perf_counter() - started)
            if looks_ahead:
                await self._look_ahead()
        except asyncio.CancelledError:
            await self.stop()
            raise
        return True

    async def _track_evaluation(self) -> None:
        """Send the newest evaluated version's figures to the trackers, if they have changed."""
        if not self._trackers.is_tracking or perf_counter() < self._looked_at + EXPIRE_S:
            return
        self._looked_at = perf_counter()
        async with self._engine.connect() as connection:
            curve = await rewards_by_version(connection, self._policy)
        scored = [point for point in curve if point.scored]
        if scored and scored[-1] != self._evaluated:
            self._evaluated = scored[-1]
            self._trackers.log(self._policy, {"eval": msgspec.structs.asdict(scored[-1])})

    async def _update_from(self, parent: PolicyVersion) -> bool:
        """Claim and run updates of `parent` until one succeeds; return False if none can begin."""
        while not self._breaker.is_open:
            claim, plan = await self._take_next_claim(parent)
            if claim is None:
                return False
            try:
                plan = plan or await self._training.plan(claim, self._recipe, self._test_servers)
                await self._run_update(claim, plan, parent)
            except LearnerError as error:
                await self._undo_update(claim, error)
            except ClaimSpoilt as error:
                await self._recovery.abandon_update(claim.update_id, str(error))
                parent = await self._versions.head()
            else:
                return True
        await self._free_next_update()
        return False

    async def _take_next_claim(self, parent: PolicyVersion) -> tuple[Claim | None, Plan | None]:
        """Return the claim of the next update of `parent`, if any, and its plan, if made ahead."""
        if self._ahead is not None and self._ahead[0].parent_version == parent.version:
            (claim, plan), self._ahead = self._ahead, None
            return claim, plan
        await self._free_next_update()
        return await self._claiming.claim_update(parent.version), None

    async def _undo_update(self, claim: Claim, why: LearnerError) -> None:
        await self._claiming.end_failed(claim.update_id, why)
        await self._count_failed_update(why, claim)

    async def _run_update(self, claim: Claim, plan: Plan, parent: PolicyVersion) -> None:
        """Make and record the version of a claim, or only record the update if there is no signal.

        Raises:
            LearnerError: the update cannot be computed; its claim is still open.
        """
        number = await self._versions.next_number()
        log.info("update_begun", update=str(claim.update_id), version=number, **plan.metrics)
        if not plan.rows:
            await self._recording.record_update(claim, plan, plan.metrics)
            self._trackers.log(self._policy, plan.metrics, number)
            return
        trained = await self._training.train(parent.version, plan.rows, plan.step_share)
        policy_logprobs = self._training.policy_logprobs()
        new = await self._training.describe_version(claim, plan, number, plan.metrics | trained)
        folder = await self._training.write(new)
        await self._recording.record_update(
            claim, plan, new.metrics, (number, folder), policy_logprobs
        )
        self._trackers.log(self._policy, new.metrics, number)

    async def _look_ahead(self) -> None:
        """Claim and plan the next update, while the controller publishes the version of the last.

        The result is the same as after the publication: the last update is recorded already.
        """
        parent = await self._versions.head()
        if parent.state != "written":
            return
        # A version that waits for a decision has no traffic when it is published.
        serves = self._recipe.publish.serves_at_once
        claim = await self._claiming.claim_update(parent.version, parent_serves=serves)
        if claim is None:
            return
        try:
            plan = await self._training.plan(claim, self._recipe, self._test_servers)
            self._ahead = claim, plan
        except LearnerError as error:
            await self._claiming.end_failed(claim.update_id, error)
            self._failed_ahead = error, claim

    async def _free_next_update(self) -> None:
        """Free the episodes of the update that was begun ahead, if there is one."""
        if self._ahead is not None:
            (claim, _), self._ahead = self._ahead, None
            why = "it was planned for a version that does not serve, or training is paused"
            await self._recovery.abandon_update(claim.update_id, why)

    @property
    def awaits_controller(self) -> bool:
        """Return whether the newest version was still unpublished at the last check."""
        return self._awaited is not None

    async def is_published(self) -> bool:
        """Return whether the controller has loaded or rejected the policy's newest version.

        If it has, the result is noted once.
        """
        written = await self._versions.written()
        if written:
            await self._await_controller(written[-1])
            return False
        if self._awaited is not None:
            awaited, self._awaited = await self._versions.numbered(self._awaited.version), None
            self._is_wait_logged = False
            await self._note_published(awaited)
        return True

    async def _await_controller(self, version: PolicyVersion) -> None:
        """Log if a written version waits for long; a new trainer offers its files again first."""
        if self._awaited is None or self._awaited.version != version.version:
            await self._servers.files.offer(Path(version.adapter_path or ""))
            self._awaited, self._awaited_since = version, perf_counter()
            self._is_wait_logged = False
        elif not self._is_wait_logged and perf_counter() > self._awaited_since + PUBLISHED_WITHIN_S:
            self._is_wait_logged = True
            warn_of_wait(version)

    async def _note_published(self, version: PolicyVersion) -> None:
        """Count a rejection, or forget earlier ones; files of older versions may go now."""
        if version.state == "rejected":
            UPDATES.labels(self._policy, "rejected").inc()
            why = await self._versions.newest_reason(version.version)
            self._breaker.count_failure(why, "rejected")
            self._log_pause()
        else:
            self._breaker.forget_failures()
        if self._failed_ahead is not None:
            # Counted now, as it comes after the result of its parent.
            failed, self._failed_ahead = self._failed_ahead, None
            await self._count_failed_update(*failed)
        await self._cleaning.clean()

    async def _test_servers(self, distant: int, measured: int) -> None:
        """Test the model servers, as `distant` of `measured` episodes are too far off the policy.

        Raises:
            ServerAtFault: a server is at fault, and may have sampled those episodes wrongly.
        """
        why = await self._self_test.why_servers_fail()
        if why is not None:
            self._breaker.count_drift()
            raise ServerAtFault(
                f"{distant} of {measured} episodes are too far off the policy, and a model server"
                f" is at fault: {why}"
            )
        log.warning("many_episodes_off_policy", policy=self._policy, far=distant, measured=measured)

    async def _count_failed_update(self, error: LearnerError, claim: Claim) -> None:
        """Count a failed update, unless its bad episodes are consumed and the next can succeed.

        If a server may have sampled rows wrongly, test the servers: the fault may be over by now.
        """
        members = sum(len(group.episodes) for group in claim.groups)
        # If most episodes are to blame, the system is probably at fault.
        is_fault = isinstance(error, Unusable) and looks_like_a_fault(len(error.episodes), members)
        if error.is_poison and not is_fault:
            return
        if isinstance(error, TeacherError):
            # A second update would fail as well, so pause after the first.
            self._breaker.pause_until_test(str(error), _pause_reason(error))
            self._log_pause()
            return
        why: str | None = str(error)
        if error.suspects_servers:
            self._breaker.count_drift()
            why = await self._self_test.why_servers_fail()
        if why is None:
            await self._exclude_wrong_samples()
            self._breaker.count_past_fault(str(error))
        else:
            self._breaker.count_failure(why, _pause_reason(error))
        self._log_pause()

    async def _exclude_wrong_samples(self) -> None:
        """Exclude all earlier samples, if a server was at fault and passes its test now.

        Otherwise each of the next updates would fail and consume some of them.
        """
        if self._breaker.sampled_wrongly:
            async with self._engine.begin() as connection:
                episodes = await exclude_after_fault(connection, self._policy)
            log.warning("episodes_excluded", policy=self._policy, episodes=episodes)

    def _log_pause(self) -> None:
        if self._breaker.is_open:
            show_pause(self._policy, self._breaker.reason)
            log.error("training_paused", policy=self._policy, reason=self._breaker.why)


def _pause_reason(error: LearnerError) -> PauseReason:
    if error.suspects_servers or isinstance(error, ServerAtFault):
        return "server"
    if isinstance(error, TeacherError):
        return "teacher"
    return "out_of_memory" if isinstance(error, ShortOfMemory) else "failed"
