"""Read the recipe that an update recorded, also one from before a key was there (pure)."""

from collections.abc import Mapping
from typing import Any, Final

from trainer.recipes.recipe import Recipe

# What was done before there was a key, where it is not what the key's default does.
BEFORE: Final[Mapping[str, Mapping[str, Any]]] = {"credit": {"air_spread": None}}


def recorded_recipe(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe that an update recorded, which has every key that there was then.

    Raises:
        pydantic.ValidationError: it has a key that this version of Pawl does not know.
    """
    completed = {
        table: dict(then) | dict(values[table]) for table, then in BEFORE.items() if table in values
    }
    return Recipe.model_validate(dict(values) | completed)
