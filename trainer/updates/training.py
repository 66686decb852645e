"""Run the steps of an update that need the learner: measure and plan, train, and write.

The learner computes for minutes in a thread, so that the event loop can still stop it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID

import msgspec
import structlog

from store.claims import Claim
from store.values.packing import unpack_ids
from store.values.sampling import distribution_of
from trainer.batches import Row, RowKey, with_logprobs
from trainer.errors import AdapterError, Interrupted, LearnerError, NotFetched
from trainer.learners.protocol import LearnerProtocol
from trainer.publishing import adapters
from trainer.publishing.adapters import NewVersion
from trainer.publishing.probe import ProbeRow
from trainer.publishing.sources import AdapterFiles
from trainer.recipes.recipe import Recipe
from trainer.updates.circuit_breaker import looks_like_a_fault
from trainer.updates.plan import (
    OTHER_BASE,
    VERSION_GONE,
    LeftOut,
    Plan,
    calls_with_grammar,
    corrected_calls,
    episodes_too_far,
    plan_update,
    refused_corrections,
    rows_to_compute,
    shares_by_episode,
    smallest_share_metric,
    taught_plan,
    versions_to_ask,
)
from trainer.updates.teacher import Teacher

log = structlog.get_logger()

T = TypeVar("T")
# Seconds between attempts to write a version that the disk refused.
WRITE_AGAIN_S: Final = 5.0
# Called if a server may be at fault, with two numbers: episodes too far off the policy, and all
# measured episodes.
OnSuspicion = Callable[[int, int], Awaitable[None]]


async def in_thread(learner: LearnerProtocol, work: Callable[[], T]) -> T:
    """Run `work`, which uses the learner, in a thread.

    If the caller is cancelled, interrupt the learner, and wait until `work` has ended.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        learner.interrupt()
        await asyncio.wait([running])
        # Retrieve the exception: asyncio would print the traceback of one that nobody retrieves.
        error = running.exception()
        if not (error is None or isinstance(error, Interrupted)):
            log.warning("error_while_stopping", reason=f"{type(error).__name__}: {error}")
        raise


class VersionFolders(Protocol):
    """Finds the files of a policy's versions."""

    async def deleted(self, asked: Collection[int]) -> set[int]:
        """Return the versions among `asked` whose files were deleted."""

    def folder(self, version: int) -> Path | None:
        """Return the folder of a version's files, or None for version 0, the base model."""


class Training:
    """Run the steps of an update that need the learner, one after the other, each in a thread."""

    def __init__(
        self,
        learner: LearnerProtocol,
        adapter_dir: Path,
        versions: VersionFolders,
        teacher: Teacher | None = None,
        files: AdapterFiles | None = None,
    ) -> None:
        """Store the parts; `files` (None: nothing to do) offers new versions to other machines."""
        self._teacher = teacher
        self._files = files or AdapterFiles()
        self._learner = learner
        self._adapter_dir = adapter_dir
        self._versions = versions

    async def plan(self, claim: Claim, recipe: Recipe, on_suspicion: OnSuspicion) -> Plan:
        """Plan a claim's update, without episodes that are too far off the parent version.

        The plan's rows have all log-probabilities: those that the server did not give are computed
        with the versions that sampled the rows. A teacher, if any, gives the advantages.
        `on_suspicion` is called if so many episodes are too far that a server may be at fault.

        Raises:
            LearnerError: some rows cannot be computed, or `on_suspicion` found a server at fault.
        """
        refused, replies = await self._corrections(claim, recipe)
        left_out = LeftOut(refused_corrections=refused)
        if recipe.imitation_rule is not None:
            # The loss of imitation uses no ratios, so nothing needs to be measured.
            return plan_update(claim, recipe, left_out, replies)
        left_out = msgspec.structs.replace(
            left_out,
            lost_versions=await self._lost_versions(claim),
            unreplayed_calls=await self._unreplayable_calls(claim),
        )
        plan = plan_update(claim, recipe, left_out, replies)
        if not plan.rows:
            return plan
        limits = recipe.off_policy
        rows, shares = await self._measure_effective_shares(
            claim.parent_version, plan.rows, limits.ratio_cap
        )
        distant = episodes_too_far(shares, limits.min_effective_sample)
        if looks_like_a_fault(len(distant), len(shares)):
            await on_suspicion(len(distant), len(shares))
        if distant:
            left_out = msgspec.structs.replace(left_out, off_policy_episodes=distant)
            plan = plan_update(claim, recipe, left_out, replies)
        logprobs = {row.key: row.sampled_logprobs for row in rows}
        plan = msgspec.structs.replace(
            plan,
            rows=tuple(with_logprobs(plan.rows, logprobs)),
            metrics=plan.metrics | smallest_share_metric(shares),
        )
        sampled = [row for row in plan.rows if not row.is_correction]
        if self._teacher is None or not sampled:
            return plan
        return taught_plan(plan, await self._teacher.logprobs(sampled))

    async def _corrections(
        self, claim: Claim, recipe: Recipe
    ) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
        """Return why some corrections cannot be trained, and the token ids of all others.

        Both are by call id.
        """
        refused = refused_corrections(claim, recipe)

        def make_reply_ids() -> dict[str, tuple[int, ...] | str]:
            return {
                str(call.id): self._learner.reply_ids(
                    call.request, unpack_ids(call.tokens.prompt_ids), text
                )
                for call, text in corrected_calls(claim)
                if str(call.id) not in refused
            }

        results = await in_thread(self._learner, make_reply_ids)
        refused |= {call: why for call, why in results.items() if isinstance(why, str)}
        for call, why in refused.items():
            log.warning("correction_refused", about=call, reason=why)
        return refused, {call: ids for call, ids in results.items() if not isinstance(ids, str)}

    async def _lost_versions(self, claim: Claim) -> dict[int, str]:
        """Return, by version, why it can no longer compute the claim's missing log-probabilities.

        Only versions that sampled a call without log-probabilities are checked.

        Raises:
            FilesUnread: a version's files cannot be read for now, so it may not be lost.
        """
        asked = versions_to_ask(claim) - {0, claim.parent_version}
        if not asked:
            return {}
        deleted = await self._versions.deleted(asked)
        for version in sorted(asked & deleted):
            why = "its files were deleted, because they were no longer needed"
            log.warning("version_lost", version=version, reason=VERSION_GONE, why=why)

        def find_lost_versions() -> dict[int, str]:
            reasons = {version: self._why_lost(version) for version in sorted(asked - deleted)}
            return {version: why for version, why in reasons.items() if why is not None}

        return dict.fromkeys(asked & deleted, VERSION_GONE) | await in_thread(
            self._learner, find_lost_versions
        )

    def _why_lost(self, version: int) -> str | None:
        folder = self._versions.folder(version)
        assert folder is not None
        try:
            gone = adapters.read_manifest(folder) is None
            why = f"{folder} has no manifest" if gone else self._learner.why_another_base(folder)
            reason = VERSION_GONE if gone else OTHER_BASE
        except AdapterError as error:
            why, reason = str(error), VERSION_GONE
        if why is None:
            return None
        log.warning("version_lost", version=version, reason=reason, why=why)
        return reason

    async def _unreplayable_calls(self, claim: Claim) -> dict[str, str]:
        """Return, by call id, why the grammar of a claim's call cannot be replayed."""

        def find_unreplayable_calls() -> dict[str, str]:
            reasons = {
                str(call.id): self._learner.why_unreplayable(
                    distribution_of(call.sampling), tuple(unpack_ids(call.tokens.sampled_ids))
                )
                for call in calls_with_grammar(claim)
            }
            return {call: why for call, why in reasons.items() if why is not None}

        return await in_thread(self._learner, find_unreplayable_calls)

    async def _measure_effective_shares(
        self, parent: int, rows: Sequence[Row], cap: float
    ) -> tuple[Sequence[Row], dict[UUID, float]]:
        """Return `rows` with missing log-probabilities filled in, and effective shares by episode.

        An episode's share is its effective sample size under version `parent`, as a share of its
        tokens, with ratios truncated at `cap`. Only rows of other versions are measured.
        """
        folder = self._versions.folder(parent)

        def complete_and_measure() -> tuple[Sequence[Row], dict[UUID, float]]:
            self._learner.restore(folder)
            complete = self._fill_in_logprobs(rows)
            others = [row for row in complete if row.version != parent and not row.is_correction]
            if not others:
                return complete, {}
            # `_fill_in_logprobs` may have loaded another version.
            self._learner.restore(folder)
            policy = self._learner.version_logprobs(folder, others)
            return complete, shares_by_episode(others, policy, cap)

        return await in_thread(self._learner, complete_and_measure)

    def _fill_in_logprobs(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Fill in missing log-probabilities, computed with the versions that sampled the rows."""
        values: dict[RowKey, Sequence[float]] = {}
        for version, own in rows_to_compute(rows).items():
            logprobs = self._learner.version_logprobs(self._versions.folder(version), own)
            values |= zip((row.key for row in own), logprobs, strict=True)
        return with_logprobs(rows, values)

    async def train(self, parent: int, rows: Sequence[Row], step_share: float) -> dict[str, Any]:
        """Train version `parent` on `rows`, and return the metrics (`LearnerProtocol.update`)."""

        def restore_and_update() -> dict[str, Any]:
            self._learner.restore(self._versions.folder(parent))
            return self._learner.update(rows, step_share)

        return await in_thread(self._learner, restore_and_update)

    def policy_logprobs(self) -> Mapping[RowKey, bytes]:
        """Return the packed log-probabilities of the last update's rows (`LearnerProtocol`)."""
        return self._learner.policy_logprobs()

    async def probe(self) -> tuple[ProbeRow, ...]:
        """Return the probe rows of a new version: ids, and the trained and the base model's values.

        Raises:
            LearnerError: the log-probabilities are not finite.
        """
        rows = self._learner.probe_rows()
        of_rows = await in_thread(self._learner, partial(self._learner.logprobs, rows))
        base_scores = partial(self._learner.version_logprobs, None, rows)
        of_base = await in_thread(self._learner, base_scores)
        if not all(map(isfinite, chain.from_iterable(of_rows))):
            raise LearnerError(
                "the version's weights give log-probabilities that are not finite:"
                " its training failed"
            )
        return tuple(
            ProbeRow(ids=tuple(row.ids), logprobs=tuple(logprobs), base_logprobs=tuple(base))
            for row, logprobs, base in zip(rows, of_rows, of_base, strict=True)
        )

    async def describe_version(
        self, claim: Claim, plan: Plan, number: int, metrics: Mapping[str, Any]
    ) -> NewVersion:
        """Describe the trained policy as version `number`, which the update of a claim makes."""
        return NewVersion(
            policy=claim.policy,
            version=number,
            update_id=claim.update_id,
            parent_version=claim.parent_version,
            outcomes=plan.outcomes,
            metrics=metrics,
            probe=await self.probe(),
            baselines=plan.baselines,
        )

    async def write(self, new: NewVersion) -> Path:
        """Write the trained policy as version `new`, offer its files, and return its folder.

        If the disk refuses, the trained weights stay in memory, and writing is tried again until it
        succeeds. If the files cannot be offered, the version waits until its trainer could.
        """
        write = partial(adapters.write_version, self._adapter_dir, new, self._learner.save)
        while True:
            try:
                folder = await in_thread(self._learner, write)
            except OSError as error:
                log.error("version_not_written", reason=str(error), again_in_s=WRITE_AGAIN_S)
                await asyncio.sleep(WRITE_AGAIN_S)
            else:
                break
        self._learner.mark_saved(folder)
        try:
            await self._files.offer(folder)
        except NotFetched as error:
            log.warning("adapter_not_uploaded", version=new.version, reason=str(error))
        return folder
