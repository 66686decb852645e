"""Define `[claim]`: when the episodes of a task make a group, and groups an update."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from trainer.recipes.options import Count, Positive, RecipeOptions


class ClaimOptions(RecipeOptions):
    """Set `[claim]`: the episodes that make an update (`store.updates.ready.ClaimRule`)."""

    group_size: Count = Field(
        default=8,
        description="Episodes of one task that are compared as a group. 1 takes episodes one by "
        "one, for a baseline that needs no group.",
    )
    groups: Count = Field(
        default=16,
        description="Groups in an update. With a baseline that compares within groups, only groups "
        "whose rewards differ count, and as many others are taken along; an update of fewer takes "
        "a step that is smaller by as much.",
    )
    most_groups: Count | None = Field(
        default=None,
        description="Most groups in an update that had to wait for an adapter slot of the model "
        "server. Unset: four times groups.",
    )
    smallest_group: Count = Field(
        default=2,
        description="Fewest episodes of a group that is taken although it is incomplete. The "
        "default is 1 if group_size is 1.",
    )
    max_age_s: Positive = Field(
        default=600.0,
        description="An incomplete group is taken this long after its first reward.",
    )
    max_staleness: Annotated[int, Field(ge=0)] = Field(
        default=64,
        description="Versions with traffic that may lie between sampling and training; older "
        "episodes are consumed, untrained. It only keeps anything from waiting forever: what is "
        "too far off the policy is measured (off_policy.min_effective_sample). Not less than twice "
        "the model server's adapter slots, or long episodes are lost.",
    )
    max_episode_age_s: Positive | None = Field(
        default=None,
        description="Episodes without any activity for this long are consumed, untrained. "
        "Unset: never.",
    )
    failed_after_s: Positive = Field(
        default=60.0,
        description="An unscored episode that failed takes credit.failed_reward, if "
        "that is set, after this long without activity.",
    )
    call_rewards_after_s: Positive = Field(
        default=60.0,
        description="An episode with rewards for single calls only counts as scored after this "
        "long without a call or such a reward, if credit.assignment uses these rewards.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_is_smallest_of_one(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("group_size") == 1:
            return {"smallest_group": 1} | values
        return values

    @model_validator(mode="after")
    def _limits_fit(self) -> "ClaimOptions":
        if self.most_groups is not None and self.most_groups < self.groups:
            raise ValueError("most_groups must not be smaller than groups")
        if self.smallest_group > self.group_size:
            raise ValueError("smallest_group must not be larger than group_size")
        if self.max_episode_age_s is not None and self.max_episode_age_s <= self.max_age_s:
            raise ValueError(
                "max_episode_age_s must be larger than max_age_s, which short groups wait for"
            )
        return self
