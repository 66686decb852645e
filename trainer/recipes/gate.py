"""Define `[gate]`: what decides whether a version that passed its probe gets the traffic."""

from math import isfinite
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from trainer.recipes.options import Count, Finite, Positive, RecipeOptions

# All new episodes but a few go to the version that serves, which the others are compared with.
Portion = Annotated[float, Field(gt=0, le=0.5)]
# A week: whoever waits for longer learns of a version when it is long past.
LONGEST_DELAY_S: Final = 604_800.0
Delay = Annotated[float, Field(gt=0, le=LONGEST_DELAY_S)]


class GateOptions(RecipeOptions):
    """Set `[gate]`: whether live rewards decide about a version, and by what test."""

    mode: Literal["immediate", "gated"] = Field(
        default="immediate",
        description='"immediate": a version serves as soon as it passes the probe. "gated": it '
        "gets a share of the new episodes first, and the traffic once their rewards show that it "
        "is no worse.",
    )
    updates_per_candidate: Count = Field(
        default=1, description="Updates after each other that make one candidate for the gate."
    )
    canary_share: Portion = Field(
        default=0.1, description="Share of the new episodes that the version on trial gets."
    )
    base_share: Annotated[float, Field(ge=0, le=0.5)] = Field(
        default=0.02,
        description="Share of the new episodes that the base model keeps for good, by which a "
        "change of the world is told from one of a version. 0: none, and what serves is never "
        'rolled back by its rewards. Without the key it is 0 in the mode "immediate".',
    )
    margin: Positive = Field(
        default=0.02,
        description="By how much the mean reward may be lower for a version to count as no worse, "
        "in units of the reward.",
    )
    reward_range: tuple[Finite, Finite] = Field(
        default=(0.0, 1.0),
        description="Lowest and highest reward; what lies outside counts as the nearest of them, "
        "and while more than one in twenty of a version's do, nothing is promoted. An episode that "
        "failed counts as the lowest.",
    )
    reward_delay_s: Delay = Field(
        default=600.0,
        description="Seconds after its beginning until an episode counts: its calls must have "
        "ended, and its reward have come, by then. One whose first call has not ended counts as "
        "failed. Longer than the longest call, and no shorter than `PAWL_SILENCE_S`.",
    )
    deadline_s: Positive = Field(
        default=86400.0,
        description="Seconds after which a version on trial that was not seen to be no worse is "
        "rolled back.",
    )
    mistakes: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.05,
        description="Largest probability of a wrong decision about a version, over all looks.",
    )
    replay_states: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Recorded calls that a candidate answers before it gets any episode, half of "
        "them of evaluation if there are so many. 0: none.",
    )
    replay_tokens: Count = Field(
        default=64, description="Most tokens of an answer to a recorded call."
    )
    most_kl_to_serving: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1.0,
        description="Largest KL of a candidate to the version that serves, in nats a token of its "
        "answers to recorded calls. One that is further away is rejected.",
    )
    most_malformed: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.2,
        description="By how much the share of malformed tool calls in a candidate's answers may be "
        "above that of the version that serves.",
    )
    most_kl_to_base: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Largest KL of a version to its base model, in nats a token of what it was "
        "trained on. One that is further away is rejected before it has any traffic, in both "
        "modes. Without the key none is.",
    )
    fewest: Count = Field(
        default=50,
        description="Episodes with a reward that each of the two versions must have had before the "
        "one on trial gets the traffic.",
    )

    @property
    def is_gated(self) -> bool:
        """Return whether live rewards decide about a version."""
        return self.mode == "gated"

    @property
    def is_watched(self) -> bool:
        """Return whether live rewards may roll back a version that serves untried."""
        return not self.is_gated and self.base_share > 0

    @model_validator(mode="before")
    @classmethod
    def _no_share_unasked(cls, given: Any) -> Any:
        """Give the base model no episodes of a policy without trials, unless somebody says so."""
        if isinstance(given, dict) and given.get("mode", "immediate") == "immediate":
            return {"base_share": 0.0, **given}
        return given

    @field_validator("reward_delay_s", mode="before")
    @classmethod
    def _comes_within_a_week(cls, given: Any) -> Any:
        """Refuse a delay after which a decision is about a version of long ago, and say so."""
        if isinstance(given, (int, float)) and given > LONGEST_DELAY_S:
            raise ValueError(
                f"{given:g} s is more than a week ({LONGEST_DELAY_S:g} s), and no episode would"
                " count before that: set the seconds after an episode's beginning by which its"
                " reward is there, such as 600; what comes later is trained on all the same"
            )
        return given

    @model_validator(mode="after")
    def _numbers_fit(self) -> "GateOptions":
        lowest, highest = self.reward_range
        if lowest >= highest or not isfinite(highest - lowest):
            raise ValueError(
                "reward_range must be [lowest, highest] with lowest below highest, and not so far"
                " below it that their difference is no finite number"
            )
        if self.margin >= highest - lowest:
            raise ValueError("margin must be smaller than the width of reward_range")
        if self.canary_share + self.base_share >= 1.0:
            raise ValueError(
                "canary_share + base_share must be below 1: the version that serves needs episodes "
                "to be compared with"
            )
        if self.deadline_s <= self.reward_delay_s:
            raise ValueError(
                "deadline_s must be larger than reward_delay_s: no episode would count before it"
            )
        return self
