"""Do one past update again: its claim without what is left out, on another parent.

It is recorded as any other (`trainer.updates.recording`), with an update of its own that holds no
episode: a kill at any step is ended by what ends killed updates (`trainer.updates.recovery`).
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import UUID

import msgspec
import structlog
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncEngine

from store.rebuilding.line import Item, PastRow, Rebuilt
from store.rebuilding.reading import PastClaim, past_claim
from store.records import Record
from store.schema.trained import LEFT_OUT, REBUILT
from store.updates import claims
from store.updates.claims import Claim
from trainer.errors import RecipeError, Unusable
from trainer.learners.protocol import LearnerProtocol
from trainer.publishing.adapters import NewVersion
from trainer.recipes.recipe import Recipe
from trainer.settings import TrainerSettings
from trainer.updates.plan import Plan, lost_in, plan_update
from trainer.updates.planning import Planning
from trainer.updates.recording import Recording
from trainer.updates.recovery import Recovery
from trainer.updates.staleness import far_in
from trainer.updates.training import Training
from trainer.updates.unreplayed import unreplayed_in
from trainer.updates.versions import Versions

log = structlog.get_logger()

NO_FIGURES: Final[dict[str, Any]] = {}
NOBODY: Final[dict[UUID, str]] = {}
# Gives the learner of a recipe, which may be the one before.
Learners = Callable[[Recipe], LearnerProtocol]


class Place(Record, frozen=True, kw_only=True):
    """Tell where in the new line an update stands.

    It comes `after` another (None: the first), has `parent` as its version's parent, and starts
    from `baselines`.
    """

    after: UUID | None
    parent: int
    baselines: Mapping[str, Any] | None


class Again:
    """Do the updates of one policy again, one after the other."""

    def __init__(
        self, settings: TrainerSettings, engine: AsyncEngine, learners: Learners, policy: str
    ) -> None:
        """Connect the stages; `policy` is the name of the policy whose line is rebuilt."""
        self._engine = engine
        self._learners = learners
        self._policy = policy
        self._folder = settings.adapter_dir
        self._versions = Versions(engine, self._folder, policy)
        self._recording = Recording(engine, policy)
        self._recovery = Recovery(engine, self._folder, policy, self._versions, self._recording)

    async def do(self, item: Item, left_out: frozenset[UUID], place: Place) -> PastRow:
        """Do an update again without the episodes `left_out`, and return it as it is recorded now.

        If it is stopped, either all of it is done, or nothing.

        Raises:
            Damaged: a call cannot be read back.
            LearnerError: it cannot be computed, and no episode is to blame.
            RecipeError: its recipe has keys that this version of Pawl does not know.
        """
        async with self._engine.connect() as connection:
            past = await past_claim(connection, item.source.id, left_out)
        recipe = _recipe(past)
        update_id = await self._begin(past, place.parent)
        claim = msgspec.structs.replace(
            past.claim,
            update_id=update_id,
            parent_version=place.parent,
            baselines=place.baselines,
        )
        try:
            return await self._run(item, claim, past, recipe, left_out, place)
        except (Exception, asyncio.CancelledError):
            await self._recovery.finish_if_possible("the rebuild was stopped")
            raise

    async def _begin(self, past: PastClaim, parent: int) -> UUID:
        async with self._engine.begin() as connection:
            return await claims.begin_update(
                connection, self._policy, parent, past.recipe, **past.limits
            )

    async def _run(
        self,
        item: Item,
        claim: Claim,
        past: PastClaim,
        recipe: Recipe,
        left_out: frozenset[UUID],
        place: Place,
    ) -> PastRow:
        training = await self._training(recipe) if item.trains else None
        if training is None:
            plan, trained, blamed = _as_it_was(claim, past, recipe), NO_FIGURES, NOBODY
        else:
            plan, trained, blamed = await self._trained(training, claim, recipe)
        rebuilt = Rebuilt(
            source=item.source.id,
            after=place.after,
            left_out=tuple(sorted(left_out)),
            untrained=dict.fromkeys(left_out, LEFT_OUT) | blamed | _untrained(plan),
        )
        metrics = {**plan.metrics, **trained, REBUILT: msgspec.to_builtins(rebuilt)}
        version = await self._write(training, claim, plan, recipe, metrics)
        return PastRow(
            id=claim.update_id,
            parent_version=place.parent,
            version=version,
            has_baselines=plan.baselines is not None,
            rebuilt=rebuilt,
        )

    async def _training(self, recipe: Recipe) -> Training:
        """Return the steps that need the learner of a recipe, which may have to be loaded first."""
        learner = await asyncio.to_thread(self._learners, recipe)
        return Training(learner, self._folder, self._versions)

    async def _trained(
        self, training: Training, claim: Claim, recipe: Recipe
    ) -> tuple[Plan, dict[str, Any], dict[UUID, str]]:
        """Train on the claim; return the plan, the metrics, and who made it impossible, and why.

        Where an update cannot be computed with some episodes, the trainer spends these and claims
        the others again: here it is planned again without them.
        """
        blamed: dict[UUID, str] = {}
        planning = Planning(training, recipe, self._note_doubt)
        while True:
            try:
                plan = await planning.plan(claim, claim.parent_version)
                if not plan.rows:
                    return plan, {}, blamed
                parent = claim.parent_version
                return plan, await training.train(parent, plan.rows, plan.step_share), blamed
            except Unusable as error:
                if not error.episodes.keys() - blamed.keys():
                    raise
                blamed |= dict.fromkeys(error.episodes, error.reason)
                claim = _without(claim, blamed)
                log.warning("episodes_unusable", reason=error.reason, episodes=len(error.episodes))

    async def _note_doubt(self, far: int, measured: int) -> None:
        """Log that many episodes are too far off: the new line is another than that they came from.

        What a model server does now says nothing about when they were sampled.
        """
        log.warning("many_episodes_off_policy", policy=self._policy, far=far, measured=measured)

    async def _write(
        self,
        training: Training | None,
        claim: Claim,
        plan: Plan,
        recipe: Recipe,
        metrics: dict[str, Any],
    ) -> int | None:
        """Write and record the trained version; return its number, or None if there is none."""
        if training is None or not plan.rows:
            await self._recording.rebuilt(claim.update_id, metrics, plan.baselines, None)
            return None
        new = NewVersion(
            policy=self._policy,
            version=await self._versions.next_number(),
            update_id=claim.update_id,
            parent_version=claim.parent_version,
            outcomes=(),
            metrics=metrics,
            probe=await training.probe(),
            baselines=plan.baselines,
        )
        made = (new.version, await training.write(new))
        await self._recording.rebuilt(claim.update_id, metrics, plan.baselines, made)
        return new.version


def _recipe(past: PastClaim) -> Recipe:
    try:
        return Recipe.model_validate(past.recipe)
    except ValidationError as error:
        raise RecipeError(
            "this version of Pawl cannot read the recipe of an update to rebuild"
            f" ({error.errors()[0]['msg']}): rebuild it with the version that trained it"
        ) from error


def _as_it_was(claim: Claim, past: PastClaim, recipe: Recipe) -> Plan:
    """Plan an update whose version is not of the line, for the baselines that it left."""
    metrics = past.metrics
    return plan_update(claim, recipe, lost_in(metrics), unreplayed_in(metrics), far_in(metrics))


def _untrained(plan: Plan) -> dict[UUID, str]:
    return {one.episode_id: one.reason for one in plan.outcomes if one.reason is not None}


def _without(claim: Claim, episodes: Mapping[UUID, str]) -> Claim:
    """Return a claim without some of its episodes."""
    groups = (
        msgspec.structs.replace(
            group, episodes=tuple(one for one in group.episodes if one.id not in episodes)
        )
        for group in claim.groups
    )
    return msgspec.structs.replace(claim, groups=tuple(one for one in groups if one.episodes))
