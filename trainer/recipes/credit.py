"""Define `[credit]`: how rewards become advantages and loss weights."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from store.records import TOOL_STATUSES
from trainer.credit.baselines.registry import baseline_names
from trainer.credit.normalisations.registry import normalisation_names
from trainer.recipes.options import Finite, NameFrom, Positive, RecipeOptions

Assignment = Literal["identical", "per_agent", "discounted", "first_call", "last_call", "call"]
BaselineName = Annotated[str, NameFrom(baseline_names)]
NormalisationName = Annotated[str, NameFrom(normalisation_names)]
EqualWeight = Literal["episode", "call", "token"]


class CreditOptions(RecipeOptions):
    """Set `[credit]`: from rewards to advantages and loss weights (`trainer.credit`)."""

    assignment: Assignment = Field(
        default="identical",
        description="How an episode's return is assigned to its calls (`trainer.credit.returns`).",
    )
    discount: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.95,
        description='Factor for each later call, with assignment = "discounted".',
    )
    baseline: BaselineName = Field(
        default="group",
        description="Value that a return is compared with (`trainer.credit.baselines`).",
    )
    normalisation: NormalisationName = Field(
        default="group",
        description="What the difference from the baseline is divided by: the spread that belongs "
        'to the baseline ("group"), that of the update ("batch"), or nothing ("none").',
    )
    equal_weight: EqualWeight = Field(
        default="episode",
        description="What has the same weight in the loss: each episode whatever its number of "
        "calls, each call, or each token.",
    )
    smallest_spread: Positive = Field(
        default=0.1,
        description="Lower limit of the spread that differences of final rewards are divided by, "
        "in reward units.",
    )
    # None cannot be written in TOML: it stands for recipes that were recorded before this key.
    air_spread: Positive | None = Field(
        default=0.5,
        description="Lower limit of the spread of final rewards that differences of AIR are "
        "divided by: without any spread, AIR weighs air_lambda / air_spread of a success.",
    )
    failed_reward: Finite | None = Field(
        default=None,
        description="Final reward of an episode that failed (its last call was refused for what it "
        "says, as where it outgrew the context) and that nobody scored. Unset: such episodes are "
        "not trained.",
    )
    baseline_rate: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.05,
        description='Weight of each new return in the average, with baseline = "moving".',
    )
    air_lambda: Annotated[float, Field(ge=0, le=0.2)] = Field(
        default=0.2,
        description="Factor of automatic intermediate rewards (`trainer.credit.air`); 0: none.",
    )
    air_assignment: Literal["episode", "step"] = Field(
        default="episode",
        description="Whether a call gets the AIR of all the episode's tools, or of its own only.",
    )
    air_scores: dict[str, Finite] = Field(
        default={"ok": 1.0, "error": -0.5, "timeout": -0.5, "denied": -0.5, "malformed": -1.0},
        description="Score of each tool status.",
    )
    air_tools: dict[str, dict[str, Finite]] = Field(
        default={},
        description="Scores of single tools, by tool name, in place of those in air_scores: "
        "air_tools.search = {ok = 0.2}.",
    )

    @property
    def pays_single_calls(self) -> bool:
        """Return True if rewards for single calls count (see `trainer.credit.returns`)."""
        return self.assignment in ("call", "per_agent")

    @model_validator(mode="after")
    def _statuses_are_known(self) -> "CreditOptions":
        known = ", ".join(TOOL_STATUSES)
        if set(self.air_scores) != set(TOOL_STATUSES):
            raise ValueError(f"air_scores must give a score to each of {known}, and to no other")
        for tool, scores in self.air_tools.items():
            if unknown := sorted(set(scores) - set(TOOL_STATUSES)):
                raise ValueError(
                    f"air_tools.{tool}: {unknown[0]!r} is not a tool status; use one of {known}"
                )
        return self

    @model_validator(mode="after")
    def _malformed_is_worst(self) -> "CreditOptions":
        """Refuse scores under which a malformed call is not worse than every clean failure.

        This holds across tools: otherwise a policy would garble a call of one tool to avoid
        the failure of another. Means are clipped at −1, so no score is worse than −1.
        """
        tables = {"air_scores": self.air_scores} | {
            f"air_tools.{tool}": scores for tool, scores in self.air_tools.items()
        }
        malformed = max(scores.get("malformed", -1.0) for scores in tables.values())
        for name, scores in tables.items():
            clean = min((score for key, score in scores.items() if key != "malformed"), default=1.0)
            if max(malformed, -1.0) >= clean:
                raise ValueError(
                    f"{name}: malformed must score below every clean failure of any tool, and"
                    f" scores below -1 count as -1: {clean} is not above {malformed}"
                )
        return self
