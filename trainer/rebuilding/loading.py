"""Load the learners that past updates were trained with: one after the other, on one base model."""

import gc

from trainer.learners.learner import Learner
from trainer.learners.model import Base
from trainer.recipes.recipe import Recipe
from trainer.settings import TrainerSettings


class Learners:
    """Give the learner of a recipe.

    The base model is loaded once, and again for recipes that load it otherwise.
    """

    def __init__(self, settings: TrainerSettings, model: str) -> None:
        """Store the settings, and the folder or name of the base model."""
        self._settings = settings
        self._model = model
        self._base: Base | None = None
        self._recipe: Recipe | None = None
        self._learner: Learner | None = None

    def __call__(self, recipe: Recipe) -> Learner:
        """Return a learner of `recipe`, the last one if that is its own; loading takes a while."""
        if self._learner is None or recipe != self._recipe:
            self._learner = Learner(
                self._base_for(recipe), recipe, self._settings.seed, self._settings.scratch
            )
            self._recipe = recipe
        return self._learner

    def _base_for(self, recipe: Recipe) -> Base:
        before = self._recipe
        if self._base is None or before is None or _loads_otherwise(before, recipe):
            self._base = self._learner = None
            # Both refer to each other, and the memory may not have room for two.
            gc.collect()
            self._base = Base(self._model, recipe)
        return self._base


def _loads_otherwise(before: Recipe, recipe: Recipe) -> bool:
    checkpoints = before.batch.gradient_checkpointing, recipe.batch.gradient_checkpointing
    return before.dtype != recipe.dtype or checkpoints[0] != checkpoints[1]
