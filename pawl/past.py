"""`pawl credit --update`: the credit of an update that ran, as it was when it claimed."""

from collections.abc import Iterable
from uuid import UUID

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.credit import Explained, warnings
from store.claims import Outcome
from store.past import PastUpdate, past_update
from trainer.credit.lines import credit_line
from trainer.errors import RecipeError
from trainer.recipe import Recipe
from trainer.update import Plan, plan_update


async def explain_update(engine: AsyncEngine, which: int | UUID, policy: str | None) -> Explained:
    """The credit of an update that ran, by its own recipe, from what was known when it claimed.

    Raises:
        UnknownUpdate: there is no such update.
        RecipeError: its recipe has keys that this version of Pawl does not know.
    """
    async with engine.connect() as connection:
        past = await past_update(connection, which, policy)
    recipe = _recipe(past)
    plan = plan_update(past.claim, recipe)
    lines = [
        credit_line(credit.episode, str(credit.call.id), credit.call.agent, credit)
        for credit in plan.credited
    ]
    return Explained(lines, [*warnings(recipe), *_differences(past, plan)])


def _recipe(past: PastUpdate) -> Recipe:
    try:
        return Recipe.model_validate(past.recipe)
    except ValidationError as error:
        raise RecipeError(
            f"the update's recipe is of another version of Pawl: {error.errors()[0]['msg']}"
        ) from error


def _differences(past: PastUpdate, plan: Plan) -> list[str]:
    """Where the ledger gives other figures now than the update wrote down."""
    notes = [
        f"the update had {name} = {past.metrics[name]}, and the ledger gives {value} now:"
        " something that was said before the update arrived after it"
        for name, value in plan.metrics.items()
        if name in past.metrics and past.metrics[name] != value
    ]
    was, now = _became(past.outcomes), _became(plan.outcomes)
    changes = sorted({(was[one], now[one]) for one in was.keys() & now.keys()})
    return notes + [
        f"episodes that were {before} in the update are {after} now"
        for before, after in changes
        if before != after
    ]


def _became(outcomes: Iterable[Outcome]) -> dict[UUID, str]:
    return {outcome.episode_id: outcome.reason or "trained" for outcome in outcomes}
