"""Define what all tables of a recipe share: known keys only, ranges of numbers, known names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class NameFrom:
    """Annotate a text that must be one of the names of a registry, which `names` returns."""

    names: Callable[[], Sequence[str]]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema of the text, with a check of the name."""
        return no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the JSON schema of the text, with the names that it may be."""
        return handler(core_schema) | {"enum": list(self.names())}

    def _known(self, name: str) -> str:
        known = self.names()
        if name not in known:
            raise ValueError(f"{name!r} is not known: use one of {', '.join(known)}")
        return name


class RecipeOptions(BaseModel):
    """Refuse unknown keys in a table of the recipe, and changes of its values."""

    model_config = ConfigDict(extra="forbid", frozen=True)
