"""Recompute the credit of a past update, for `pawl credit` and the console.

torch is not needed: credit is arithmetic on the ledger's data.
"""

from collections.abc import Iterable, Sequence
from uuid import UUID

import msgspec
from msgspec.structs import replace
from pydantic import ValidationError

from store.claims import Outcome
from store.read.past import PastUpdate
from trainer.credit.lines import CreditLine, credit_line
from trainer.errors import RecipeError
from trainer.recipes.recipe import Recipe
from trainer.updates.plan import LeftOut, Plan, plan_update


class ExplainedUpdate(msgspec.Struct, frozen=True):
    """A past update, and the plan recomputed from its recipe and claim.

    `notes` describe differences between the recomputed plan and the update's record.
    """

    past: PastUpdate
    recipe: Recipe
    plan: Plan
    notes: Sequence[str]

    @property
    def lines(self) -> list[CreditLine]:
        """Return the credit of each call, in the order of episodes and calls."""
        refused = LeftOut.from_metrics(self.past.metrics).refused_corrections
        lines = []
        for credit in self.plan.credited:
            call = str(credit.call.id)
            refusal = refused.get(call) or refused.get(str(credit.episode_id))
            line = credit_line(credit.episode, call, credit.call.agent, credit)
            lines.append(replace(line, correction=refusal or credit.correction or msgspec.UNSET))
        return lines


def explain_past(past: PastUpdate) -> ExplainedUpdate:
    """Recompute the credit of a past update; this takes seconds and needs no database.

    Raises:
        RecipeError: this version of Pawl cannot read the update's recipe.
    """
    recipe = _recipe(past)
    plan = plan_update(past.claim, recipe, LeftOut.from_metrics(past.metrics))
    notes = _differences(past, plan)
    if recipe.teacher is not None:
        notes.append("a teacher gave each token its advantage; the ledger does not store these")
    return ExplainedUpdate(past, recipe, plan, notes)


def _recipe(past: PastUpdate) -> Recipe:
    try:
        return Recipe.model_validate(past.recipe)
    except ValidationError as error:
        raise RecipeError(
            "this version of Pawl cannot read the recipe that the update recorded"
            f" ({error.errors()[0]['msg']}): explain it with the version that trained it"
        ) from error


def _differences(past: PastUpdate, plan: Plan) -> list[str]:
    """Return a note for each figure or outcome that differs from the update's record."""
    notes = [
        f"the update recorded {name} = {past.metrics[name]}, and the ledger gives {value} now:"
        " older feedback reached the ledger after the update"
        for name, value in plan.metrics.items()
        if name in past.metrics and past.metrics[name] != value
    ]
    recorded, present = _by_episode(past.outcomes), _by_episode(plan.outcomes)
    changes = sorted(
        {(recorded[episode], present[episode]) for episode in recorded.keys() & present.keys()}
    )
    return notes + [
        f"episodes that were {before} in the update are {after} now"
        for before, after in changes
        if before != after
    ]


def _by_episode(outcomes: Iterable[Outcome]) -> dict[UUID, str]:
    return {outcome.episode_id: outcome.reason or "trained" for outcome in outcomes}
