"""Define the tables that say how an update is computed: optimiser, batch, limits, KL, PPO, SFT."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.recipes.options import Count, Finite, NotNegative, Positive, RecipeOptions, Share

Epochs = Annotated[
    Count,
    Field(description="Passes over an update's rows, each in batch.steps optimiser steps."),
]


class OptimizerOptions(RecipeOptions):
    """Set `[optimizer]`: AdamW; the rate rises over `warmup_steps` and then follows `schedule`."""

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
    def _warm_before_the_end(self) -> "OptimizerOptions":
        if self.schedule != "constant" and self.warmup_steps >= self.total_steps:
            raise ValueError("warmup_steps must be smaller than total_steps")
        return self


class BatchOptions(RecipeOptions):
    """Set `[batch]`: how an update is computed; only `steps` changes the result."""

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


class OffPolicyOptions(RecipeOptions):
    """Set `[off_policy]`: limits for samples of another policy than the one in training."""

    ratio_cap: Annotated[Finite, Field(gt=0)] = Field(
        default=2.0, description="Upper limit of a token's ratio policy/sampled in the loss."
    )
    sequence_min: NotNegative = Field(
        default=0.5,
        description="A call of sequence_length tokens whose geometric mean ratio is below this "
        "carries no loss.",
    )
    sequence_max: Positive = Field(
        default=2.0,
        description="A call of sequence_length tokens whose geometric mean ratio is above this "
        "carries no loss.",
    )
    sequence_length: Count = Field(
        default=20,
        description="Sampled tokens of the call that the two bounds are for. The logarithms of a "
        "longer call's are smaller, and of a shorter one's larger: by the root of the lengths.",
    )
    min_effective_sample: Share = Field(
        default=0.5,
        description="An episode that another version sampled is consumed, untrained, if its "
        "effective sample size under the policy is below this share of its tokens. 0: never.",
    )
    max_drift: Positive = Field(
        default=0.1,
        description="Largest divergence of model server and trainer about the newest version, in "
        "nats per token; an update past it is not applied.",
    )

    @model_validator(mode="after")
    def _one_is_inside(self) -> "OffPolicyOptions":
        if not self.sequence_min <= 1.0 <= self.sequence_max:
            raise ValueError("sequence_min must not be above 1, nor sequence_max below it")
        return self


class KlOptions(RecipeOptions):
    """Set `[kl]`: a penalty on leaving the base model (`trainer.learners.losses.kl`)."""

    coefficient: NotNegative = Field(default=0.0, description="Factor of the KL; 0 is without.")
    place: Literal["loss", "reward"] = Field(
        default="loss", description="Whether the penalty is part of the loss or of the reward."
    )


class PpoOptions(RecipeOptions):
    """Set `[ppo]`: PPO's own numbers (arXiv:1707.06347); the learner "grpo" ignores them."""

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
    epochs: Epochs = 2


class SftOptions(RecipeOptions):
    """Set `[sft]`: the episodes that the learner "sft" trains on; the other learners ignore it."""

    min_reward: Finite = Field(
        default=1.0,
        description="Least final reward of an episode that is trained. An update waits for groups "
        "with such an episode (claim.groups); all other episodes are consumed, untrained "
        "(`low_reward`).",
    )
    most_per_task: Count | None = Field(
        default=None,
        description="Most episodes of one task that an update trains: those with the highest "
        "return, the others are consumed, untrained (`not_best`). Unset: all of them.",
    )
    epochs: Epochs = 1
