"""The parts of a recipe: one class for each TOML table, with each key's range and meaning."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from store.records import TOOL_STATUSES

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]

Assignment = Literal["identical", "per_agent", "discounted", "first_call", "last_call", "call"]
BaselineName = Literal["group", "leave_one_out", "moving", "none"]
Normalisation = Literal["group", "batch", "none"]
EqualWeight = Literal["episode", "call", "token"]


class RecipePart(BaseModel):
    """A table of the recipe: unknown keys are refused, and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ClaimPart(RecipePart):
    """`[claim]`: the episodes that make an update (`store.updates.ready.ClaimRule`)."""

    group_size: Count = Field(
        default=8,
        description="Episodes of one task that are compared as a group. 1 takes episodes one by "
        "one, for a baseline that needs no group.",
    )
    groups: Count = Field(default=16, description="Groups in an update, at most.")
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
        default=4,
        description="Versions with traffic that may lie between sampling and training; older "
        "episodes are consumed, untrained.",
    )
    max_episode_age_s: Positive | None = Field(
        default=None,
        description="Episodes without any activity for this long are consumed, untrained. "
        "Unset: never.",
    )
    failed_after_s: Positive = Field(
        default=60.0,
        description="An unscored episode whose last call failed takes credit.failed_reward, if "
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
    def _limits_fit(self) -> "ClaimPart":
        if self.smallest_group > self.group_size:
            raise ValueError("smallest_group must not be larger than group_size")
        if self.max_episode_age_s is not None and self.max_episode_age_s <= self.max_age_s:
            raise ValueError(
                "max_episode_age_s must be larger than max_age_s, which short groups wait for"
            )
        return self


class CreditPart(RecipePart):
    """`[credit]`: from rewards to advantages and loss weights (`trainer.credit`)."""

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
    normalisation: Normalisation = Field(
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
        description="Lower limit of the spread that advantages are divided by, in reward units.",
    )
    failed_reward: Finite | None = Field(
        default=None,
        description="Final reward of an episode that failed and that nobody scored. Unset: such "
        "episodes are not trained.",
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
    def _statuses_are_known(self) -> "CreditPart":
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
    def _malformed_is_worst(self) -> "CreditPart":
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


class OptimizerPart(RecipePart):
    """`[optimizer]`: AdamW; the rate rises over `warmup_steps` and then follows `schedule`."""

    learning_rate: Positive = Field(default=2e-4, description="Full learning rate.")
    weight_decay: NotNegative = Field(default=0.0, description="AdamW's weight decay.")
    max_grad_norm: Positive = Field(
        default=1.0, description="Norm that gradients are clipped to, policy and critic apart."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Decay of the learning rate after the warm-up."
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Optimiser steps over which the rate rises linearly."
    )
    total_steps: Count = Field(
        default=1000,
        description="Optimiser step at which the schedule reaches zero and training ends; "
        'without effect with schedule = "constant".',
    )

    @model_validator(mode="after")
    def _warm_before_the_end(self) -> "OptimizerPart":
        if self.schedule != "constant" and self.warmup_steps >= self.total_steps:
            raise ValueError("warmup_steps must be smaller than total_steps")
        return self


class BatchPart(RecipePart):
    """`[batch]`: how an update is computed; only `steps` changes the result."""

    steps: Count = Field(default=1, description="Optimiser steps in an update.")
    micro_batch_tokens: Annotated[int, Field(ge=64)] = Field(
        default=1024, description="Tokens that are computed at once, at most."
    )
    merge_prefixes: Literal["auto", "never"] = Field(
        default="auto",
        description='Whether shared prefixes are computed once; "auto": if the model allows it.',
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Save memory by computing activations a second time."
    )


class OffPolicyPart(RecipePart):
    """`[off_policy]`: limits for samples of another policy than the one in training."""

    ratio_cap: Positive = Field(
        default=2.0, description="Upper limit of a token's ratio policy/sampled in the loss."
    )
    sequence_min: NotNegative = Field(
        default=0.5,
        description="A call whose geometric mean ratio is below this carries no loss.",
    )
    sequence_max: Positive = Field(
        default=2.0,
        description="A call whose geometric mean ratio is above this carries no loss.",
    )
    max_drift: Positive = Field(
        default=0.1,
        description="Largest divergence of model server and trainer about the newest version, in "
        "nats per token; an update past it is not applied.",
    )

    @model_validator(mode="after")
    def _one_is_inside(self) -> "OffPolicyPart":
        if not self.sequence_min <= 1.0 <= self.sequence_max:
            raise ValueError("sequence_min must not be above 1, nor sequence_max below it")
        return self


class KlPart(RecipePart):
    """`[kl]`: a penalty on leaving the base model (`trainer.learners.kl`)."""

    coefficient: NotNegative = Field(default=0.0, description="Factor of the KL; 0 is without.")
    place: Literal["loss", "reward"] = Field(
        default="loss", description="Whether the penalty is part of the loss or of the reward."
    )


class PpoPart(RecipePart):
    """`[ppo]`: PPO's own numbers (arXiv:1707.06347); the learner "grpo" ignores them."""

    clip: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.2, description="Ratios to the old policy are clipped to 1 ± clip."
    )
    value_clip: Positive | None = Field(
        default=None,
        description="Largest change of a value in an update. Unset: not limited, which is the "
        "better choice by arXiv:2006.05990 §3.4.",
    )
    value_learning_rate: Positive = Field(
        default=1e-2, description="Full learning rate of the critic."
    )
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Discount from one call of an episode to the next."
    )
    gae_lambda: Share = Field(default=0.95, description="GAE's λ, from token to token.")
    epochs: Count = Field(
        default=2,
        description="Passes over an update's rows, each in batch.steps optimiser steps.",
    )


class LoraPart(RecipePart):
    """`[lora]`: the adapter's shape."""

    rank: Count = Field(
        default=16, description="LoRA rank; not above the model server's --max-lora-rank."
    )
    alpha: Positive = Field(default=32.0, description="LoRA scale: updates count alpha / rank.")
    target_modules: str | list[str] = Field(
        default="all-linear", description="Layers with an adapter, as PEFT names them."
    )


class PublishPart(RecipePart):
    """`[publish]`: when a version passes the probe, and when an idle one is retired."""

    tolerance: Positive = Field(
        default=0.15,
        description="Largest mean |served − trainer| log-probability of the probe's tokens, in "
        "nats. It is about 0.001 between float32 and float32, 0.05 if the server computes in bf16.",
    )
    probe_rows: Count = Field(default=4, description="Rows of the update that the probe uses.")
    retire_after_s: Positive = Field(
        default=900.0,
        description="A version that lost the traffic is retired after this long without a call.",
    )
