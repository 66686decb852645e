"""Define `[reward.METRIC]`: what a policy's reward is the sum of."""

from collections.abc import Mapping
from typing import Final

from pydantic import Field, model_validator

from store.values.rewards import REWARD_ALONE, RewardRule, RewardTerm
from trainer.recipes.options import Finite, RecipeOptions

# How long a text may be that counts for something, as long as `/feedback` takes.
LONGEST_TEXT: Final = 256


class RewardOptions(RecipeOptions):
    """Set `[reward.METRIC]`: what a metric of `/feedback` adds to the reward."""

    weight: Finite = Field(
        default=1.0, description="Factor of the metric's value in the sum; below 0 for a cost."
    )
    range: tuple[Finite, Finite] = Field(
        description="Lowest and highest value; what lies outside counts as the nearest of them.",
    )
    default: Finite | None = Field(
        default=None,
        description="Value where the metric was not stated. Unset: an episode without it is "
        "unscored, whatever else was said.",
    )
    values: dict[str, Finite] = Field(
        default={},
        description="Values of what may be stated in words: values = {good = 1.0, bad = 0.0}. "
        "Another text counts for nothing (`undeclared_text`).",
    )

    @model_validator(mode="after")
    def _values_fit(self) -> "RewardOptions":
        low, high = self.range
        if low >= high:
            raise ValueError("range must be [lowest, highest] with lowest below highest")
        if self.weight == 0:
            raise ValueError("weight must not be 0: leave the metric out instead")
        named = {"default": self.default} | {f"values.{key}": v for key, v in self.values.items()}
        for name, value in named.items():
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} is {value}, outside of range: {low} to {high}")
        for text in self.values:
            if not 0 < len(text) <= LONGEST_TEXT:
                raise ValueError(f"a text of values must have 1 to {LONGEST_TEXT} characters")
        return self


def rule_of(metrics: Mapping[str, RewardOptions]) -> RewardRule:
    """Return the sum of these metrics; the metric `reward` alone where none is named."""
    if not metrics:
        return REWARD_ALONE
    return RewardRule(
        terms=tuple(
            RewardTerm(
                metric=metric,
                weight=options.weight,
                low=options.range[0],
                high=options.range[1],
                default=options.default,
                texts=dict(options.values),
            )
            for metric, options in metrics.items()
        )
    )
