"""The parts of a recipe: every key, its range, and what it means."""

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
    """A table of the recipe: no key but its own, and none that changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ClaimPart(RecipePart):
    """Which episodes make an update (see `store.claims.ClaimRule`).

    `group_size` 1 takes episodes one by one, for a baseline that needs no group. What is
    older than `max_staleness` versions or, where it is set, has been silent for longer than
    `max_episode_age_s` is spent and not trained. An episode whose last call failed takes
    `credit.failed_reward`, where that is set, once it has been silent for `failed_after_s`.
    One whose only rewards are for single calls counts as scored, where `credit.assignment`
    pays these, once no call and no such reward has come for `call_rewards_after_s`.
    """

    group_size: Count = 8
    groups: Count = 16
    # Two, and one where `group_size` is one.
    smallest_group: Count = 2
    max_age_s: Positive = 600.0
    max_staleness: Annotated[int, Field(ge=0)] = 4
    max_episode_age_s: Positive | None = None
    failed_after_s: Positive = 60.0
    call_rewards_after_s: Positive = 60.0

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
    """How returns become advantages (see `trainer.credit`), and which share of the loss."""

    assignment: Assignment = "identical"
    discount: Annotated[float, Field(gt=0, le=1)] = 0.95
    baseline: BaselineName = "group"
    # What the advantage is divided by: the spread of what the baseline is taken over, that of
    # the update, or nothing.
    normalisation: Normalisation = "group"
    # What has the same weight: an episode whatever its number of calls, a call, or a token.
    equal_weight: EqualWeight = "episode"
    smallest_spread: Positive = 0.1
    failed_reward: Finite | None = None
    # Of the moving baseline: the share of each new return in it.
    baseline_rate: Annotated[float, Field(gt=0, le=1)] = 0.05
    air_lambda: Annotated[float, Field(ge=0, le=0.2)] = 0.2
    air_assignment: Literal["episode", "step"] = "episode"
    air_scores: dict[str, Finite] = Field(
        default={"ok": 1.0, "error": -0.5, "timeout": -0.5, "denied": -0.5, "malformed": -1.0}
    )
    # Scores of single tools by their names: {"search": {"ok": 0.2}}.
    air_tools: dict[str, dict[str, Finite]] = Field(default={})

    @property
    def pays_single_calls(self) -> bool:
        """Whether a reward for a single call counts (see `trainer.credit.returns`)."""
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
        """Of any tool, or a call of one would be spoilt to avoid the failure of another.

        Means are clipped at −1: what is below it is no worse than −1.
        """
        tables = {"air_scores": self.air_scores} | {
            f"air_tools.{tool}": scores for tool, scores in self.air_tools.items()
        }
        malformed = max(scores.get("malformed", -1.0) for scores in tables.values())
        for name, scores in tables.items():
            clean = min((score for key, score in scores.items() if key != "malformed"), default=1.0)
            if max(malformed, -1.0) >= clean:
                raise ValueError(
                    f"{name}: malformed must score below one that failed cleanly, of any tool,"
                    f" and -1 is the lowest that counts; {clean} is not above {malformed}"
                )
        return self


class OptimizerPart(RecipePart):
    """AdamW's numbers; the rate rises over `warmup_steps` and then follows `schedule`."""

    learning_rate: Positive = 2e-4
    weight_decay: NotNegative = 0.0
    max_grad_norm: Positive = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    # Where `schedule` ends at zero, and training with it; of no effect for "constant".
    total_steps: Count = 1000

    @model_validator(mode="after")
    def _warm_before_the_end(self) -> "OptimizerPart":
        if self.schedule != "constant" and self.warmup_steps >= self.total_steps:
            raise ValueError("warmup_steps must be smaller than total_steps")
        return self


class BatchPart(RecipePart):
    """How an update is computed; none of it changes what is computed but `steps`.

    `steps` optimiser steps an update; micro-batches of at most `micro_batch_tokens` tokens
    that are computed at once. `merge_prefixes` "auto" merges where the model allows it.
    """

    steps: Count = 1
    micro_batch_tokens: Annotated[int, Field(ge=64)] = 1024
    merge_prefixes: Literal["auto", "never"] = "auto"
    gradient_checkpointing: bool = False


class OffPolicyPart(RecipePart):
    """What is done about samples of another policy than the one in training.

    Ratios policy/sampled of single tokens are truncated at `ratio_cap`; a sequence whose
    geometric mean ratio is outside [`sequence_min`, `sequence_max`] carries no loss.
    `max_drift` bounds the divergence of server and trainer, in nats a token, that rows of
    the newest version show: an update past it is not published.
    """

    ratio_cap: Positive = 2.0
    sequence_min: NotNegative = 0.5
    sequence_max: Positive = 2.0
    max_drift: Positive = 0.1

    @model_validator(mode="after")
    def _one_is_inside(self) -> "OffPolicyPart":
        if not self.sequence_min <= 1.0 <= self.sequence_max:
            raise ValueError("sequence_min must not be above 1, nor sequence_max below it")
        return self


class KlPart(RecipePart):
    """What it costs to leave the base model: `coefficient` · KL, in the loss or the reward."""

    coefficient: NotNegative = 0.0
    place: Literal["loss", "reward"] = "loss"


class PpoPart(RecipePart):
    """PPO's own numbers (arXiv:1707.06347).

    `epochs` times an update goes through its rows, each time in `batch.steps` optimiser
    steps, with ratios clipped to 1 ± `clip`. `gamma` discounts from call to call, `gae_lambda`
    from token to token (see `trainer.gae`). The critic has its own learning rate;
    `value_clip` bounds how far an update moves a value (left out: not at all, which is the
    better choice by arXiv:2006.05990).
    """

    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    value_clip: Positive | None = None
    value_learning_rate: Positive = 1e-2
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    gae_lambda: Share = 0.95
    epochs: Count = 2


class LoraPart(RecipePart):
    """The adapter's shape. `rank` must not exceed the server's --max-lora-rank."""

    rank: Count = 16
    alpha: Positive = 32.0
    target_modules: str | list[str] = "all-linear"


class PublishPart(RecipePart):
    """When a version counts as served right, and when an idle one is taken away.

    `tolerance` bounds the mean |served − trainer| log-probability of the probe's tokens, in
    nats: about 0.001 between float32 and float32, 0.05 where the server computes in bf16.
    """

    tolerance: Positive = 0.15
    probe_rows: Count = 4
    retire_after_s: Positive = 900.0
