"""Define what all tables of a recipe share: known keys only, and ranges of numbers."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class RecipeOptions(BaseModel):
    """A table of the recipe: unknown keys are refused, and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
