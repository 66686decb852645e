"""Explain the credit of an update that ran, as of the time of its claim."""

from collections.abc import Iterable
from uuid import UUID

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.crediting.explain import Explained
from store.read.past import PastUpdate, past_update
from store.updates.claims import Outcome
from trainer.credit.lines import credit_line
from trainer.errors import RecipeError
from trainer.recipes.recipe import Recipe
from trainer.updates.plan import LeftOut, Plan, plan_update


async def explain_update(
    engine: AsyncEngine, which: int | UUID, policy: str | None, tenant: str | None = None
) -> Explained:
    """Compute the credit of a past update again: its recipe, its claim, its feedback.

    Args:
        engine: the database.
        which: the number of the version that the update made, or the update's id.
        policy: the policy of that version; needed only if several policies have the number.
        tenant: whose the policy is; None: anybody's.

    Raises:
        UnknownUpdate: there is no such update, there are several, or it is not finished.
        RecipeError: the update's recipe has keys that this version of Pawl does not know.
        Damaged: a call of the update cannot be read back.
    """
    async with engine.connect() as connection:
        past = await past_update(connection, which, policy, tenant)
    recipe = _recipe(past)
    plan = plan_update(past.claim, recipe, LeftOut.recorded(past.metrics))
    lines = [
        credit_line(credit.episode, str(credit.call.id), credit.call.agent, credit)
        for credit in plan.credited
    ]
    return Explained(lines, _differences(past, plan))


def _recipe(past: PastUpdate) -> Recipe:
    try:
        return Recipe.model_validate(past.recipe)
    except ValidationError as error:
        raise RecipeError(
            "this version of Pawl cannot read the recipe that the update recorded"
            f" ({error.errors()[0]['msg']}): explain it with the version that trained it"
        ) from error


def _differences(past: PastUpdate, plan: Plan) -> list[str]:
    """Return a note for each figure that differs now from what the update recorded."""
    notes = [
        f"the update recorded {name} = {past.metrics[name]}, and the ledger gives {value} now:"
        " a statement from before the update reached the ledger after it"
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
