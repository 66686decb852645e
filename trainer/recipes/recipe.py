"""Define the recipe: the learner and its numbers, a TOML file with checked keys and ranges.

The packaged recipes are the TOML files of this folder.
"""

import os
from collections.abc import Collection
from importlib.resources import files
from math import exp, isfinite, log, sqrt
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from store.records import TOOL_STATUSES
from store.settings import MAX_INT32
from store.toml_file import TomlFile
from store.values.rewards import REWARD_ALONE, RewardRule, RewardTerm
from trainer.credit.baselines import BASELINES, NORMALISATIONS
from trainer.errors import RecipeError


def _check_number(number: float) -> float:
    """Refuse a number above `MAX_INT32`, which PostgreSQL may not hold."""
    if number > MAX_INT32:
        raise ValueError(f"the number is too large; use one up to {MAX_INT32}")
    return number


# Strict: neither `true` nor "1" counts as 1.
Number = Annotated[float, Field(strict=True)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Seconds = Annotated[Number, Field(gt=0), AfterValidator(_check_number)]
Whole = Annotated[int, Field(strict=True, ge=0), AfterValidator(_check_number)]
Count = Annotated[int, Field(strict=True, ge=1), AfterValidator(_check_number)]
Text = Annotated[str, Field(min_length=1)]

# Value of `lora.target_modules`: choose the layers by the model's architecture.
AUTO: Final = "auto"
# Characters of the longest text that `/feedback` accepts.
LONGEST_TEXT: Final = 256
# Default learning rate for a model with `BASE_HIDDEN_SIZE`; it falls with the hidden size to the
# power of `RATE_EXPONENT`.
BASE_RATE: Final = 5e-5
BASE_HIDDEN_SIZE: Final = 4096
RATE_EXPONENT: Final = 0.78
# A week: with a longer delay a version would be outdated before it is decided about.
LONGEST_DELAY_S: Final = 604_800.0


def one_of(names: Collection[str]) -> AfterValidator:
    """Return a validator that refuses texts that are not in `names` when the validator runs."""

    def check_name(name: str) -> str:
        if name not in names:
            raise ValueError(f"{name!r} is not known: use one of {', '.join(names)}")
        return name

    return AfterValidator(check_name)


class RecipeTable(BaseModel):
    """A table of the recipe: immutable, without unknown keys, and without NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RewardOptions(RecipeTable):
    """The table `[reward.METRIC]`: what a metric of `/feedback` adds to the reward."""

    weight: Number = Field(
        default=1.0, description="Factor of the metric's value in the sum; below 0 for a cost."
    )
    range: tuple[Number, Number] = Field(
        description="Lowest and highest value; what lies outside counts as the nearest of them.",
    )
    default: Number | None = Field(
        default=None,
        description="Value if the metric was not stated. Unset: an episode without the metric is "
        "unscored, whatever other metrics were stated.",
    )
    values: dict[str, Number] = Field(
        default={},
        description="Values of texts that may be stated as the metric: values = {good = 1.0, "
        "bad = 0.0}. Any other text has no value (`undeclared_text`).",
    )

    @model_validator(mode="after")
    def _values_fit(self) -> "RewardOptions":
        low, high = self.range
        if low >= high or not isfinite(self.weight * (high - low)):
            raise ValueError(
                "range must be [lowest, highest] with lowest below highest, and weight times their"
                " difference a finite number"
            )
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


class ClaimOptions(RecipeTable):
    """The table `[claim]`: the episodes that make an update (`store.claim_query.ClaimRule`)."""

    group_size: Count = Field(
        default=8,
        description="Episodes of one task that are compared as a group. One whose task comes only "
        "once is compared with what its task's family earns. 1 takes all episodes one by one.",
    )
    groups: Count = Field(
        default=8,
        description="Whole groups in an update, which takes groups * group_size episodes at most "
        "and begins with 32 of them. Only those that can give a signal count: members of groups "
        "whose rewards differ, and single episodes; as many others are taken along. An update of "
        "fewer than the most takes a step that is smaller by the root of its share.",
    )
    max_age_s: Seconds = Field(
        default=600.0,
        description="An incomplete group is taken this long after its first reward.",
    )
    max_staleness: Whole = Field(
        default=64,
        description="Versions with traffic that may lie between sampling and training; older "
        "episodes only fill their groups, untrained. The limit keeps episodes from waiting "
        "forever; how far they are off the policy is measured (off_policy.min_effective_sample). "
        "Not less than twice the model server's adapter slots, or long episodes are lost.",
    )
    call_rewards_after_s: Seconds = Field(
        default=60.0,
        description="An episode with rewards for single calls only counts as scored after this "
        "long without a call or such a reward, if credit.assignment uses these rewards.",
    )


class CreditOptions(RecipeTable):
    """The table `[credit]`: from rewards to advantages and loss weights (`trainer.credit`)."""

    assignment: Literal["identical", "per_agent", "call"] = Field(
        default="identical",
        description="How an episode's return is assigned to its calls (`trainer.credit.returns`).",
    )
    baseline: Annotated[str, one_of(BASELINES)] = Field(
        default="group",
        json_schema_extra=lambda schema: schema.update(enum=list(BASELINES)),
        description="Value that a return is compared with (`trainer.credit.baselines`).",
    )
    normalisation: Annotated[str, one_of(NORMALISATIONS)] = Field(
        default="group",
        json_schema_extra=lambda schema: schema.update(enum=list(NORMALISATIONS)),
        description="What the difference from the baseline is divided by: the spread that belongs "
        'to the baseline ("group"), that of the update ("batch"), or nothing ("none"). "focal": as '
        '"group", times the failure rate of the compared episodes.',
    )
    equal_weight: Literal["auto", "episode", "call", "token"] = Field(
        default="auto",
        description="What has the same weight in the loss: each episode whatever its number of "
        "calls, each call, or each token. `auto`: each family of tasks (a small one up to four "
        "times its size), so that what is asked most does not become the answer to everything; in "
        "it each episode, or each token where the policy thinks at length before it answers (an "
        "update's calls have over 512 sampled tokens in the mean): else a token of a long wrong "
        "thought would hardly count, and wrong thoughts grow (arXiv:2503.20783 §3.1).",
    )
    failed_reward: Number | Literal["unscored"] | None = Field(
        default=None,
        description="Final reward of an episode that failed (its last call was refused because of "
        "its content, such as one longer than the context) and that nobody scored. Unset: the "
        'lower of reward_range\'s end and of the lowest reward in the update. "unscored": it is '
        "not trained.",
    )
    air_lambda: Annotated[Number, Field(ge=0, le=0.2)] = Field(
        default=0.2,
        description="Largest automatic intermediate reward (`trainer.credit.air`), as a share of "
        "the width of reward_range; 0: none.",
    )
    air_scores: dict[str, Number] = Field(
        default={"ok": 1.0, "error": 0.0, "timeout": -0.5, "denied": -0.5, "malformed": -1.0},
        description="Score of each tool status; events with the score 0 are left out.",
    )

    @property
    def compares_episodes(self) -> bool:
        """Return whether returns are compared with those of the group or the family."""
        return BASELINES[self.baseline].needs_group

    @property
    def pays_single_calls(self) -> bool:
        """Return whether rewards given to single calls are used (`trainer.credit.returns`)."""
        return self.assignment in ("call", "per_agent")

    @model_validator(mode="after")
    def _focal_has_a_baseline(self) -> "CreditOptions":
        if NORMALISATIONS[self.normalisation].is_focal and not self.compares_episodes:
            raise ValueError(
                'normalisation "focal" weighs by the failure rate of the compared episodes, but '
                'baseline "none" compares none: set baseline = "group", or another normalisation'
            )
        return self

    @model_validator(mode="after")
    def _statuses_are_known(self) -> "CreditOptions":
        if set(self.air_scores) != set(TOOL_STATUSES):
            raise ValueError(
                f"air_scores must give a score to each of {', '.join(TOOL_STATUSES)}, and to no"
                " other"
            )
        return self

    @model_validator(mode="after")
    def _malformed_is_worst(self) -> "CreditOptions":
        """Refuse scores under which a malformed call is not worse than every other outcome.

        Otherwise a policy would garble a call to avoid such a failure. Means are clipped at −1, so
        a score below −1 counts as −1.
        """
        malformed = self.air_scores["malformed"]
        lowest_other = min(score for key, score in self.air_scores.items() if key != "malformed")
        if max(malformed, -1.0) >= lowest_other:
            raise ValueError(
                "air_scores: malformed must score below every other status, and scores below -1"
                f" count as -1: {lowest_other} is not above {malformed}"
            )
        return self


Epochs = Annotated[
    Count,
    Field(description="Passes over an update's rows, each in batch.steps optimiser steps."),
]


class OptimizerOptions(RecipeTable):
    """The table `[optimizer]`: AdamW at a constant rate."""

    learning_rate: Positive | None = Field(
        default=None,
        description="Learning rate. Unset: 5e-5 · (4096 / the model's hidden size)^0.78, for "
        "adapters of any rank with lora.alpha 32 (docs/explanation/trainer.md).",
    )

    def rate_for(self, hidden_size: int) -> float:
        """Return the learning rate for a model of this hidden size.

        LoRA needs about ten times the rate of full fine-tuning, and a lower rate for wider models
        ("LoRA Without Regret", Thinking Machines, 2025; its exponent for Llama is 0.78).
        """
        if self.learning_rate is not None:
            return self.learning_rate
        return BASE_RATE * float((BASE_HIDDEN_SIZE / hidden_size) ** RATE_EXPONENT)


class BatchOptions(RecipeTable):
    """The table `[batch]`: how an update is computed; only `steps` changes the result."""

    steps: Count = Field(default=1, description="Optimiser steps in an update.")
    micro_batch_tokens: Annotated[int, Field(strict=True, ge=64), AfterValidator(_check_number)] = (
        Field(default=1024, description="Tokens that are computed at once, at most.")
    )
    gradient_checkpointing: bool | Literal["auto"] = Field(
        default="auto",
        description="Save memory by computing activations a second time; `auto`: of as many layers"
        " as must be, so that an update's longest row fits.",
    )


class OffPolicyOptions(RecipeTable):
    """The table `[off_policy]`: limits for samples of another policy than the one in training."""

    ratio_cap: Positive = Field(
        default=2.0, description="Upper limit of a token's ratio policy/sampled in the loss."
    )
    sequence_min: NotNegative = Field(
        default=0.5,
        description="A call of 20 tokens whose geometric mean ratio is below this carries no loss. "
        "The logarithm of the limit of a longer call is smaller, and of a shorter one larger: by "
        "the root of the lengths.",
    )
    sequence_max: Positive = Field(
        default=2.0,
        description="A call of 20 tokens whose geometric mean ratio is above this carries no loss; "
        "of other lengths as with sequence_min.",
    )
    min_effective_sample: Share = Field(
        default=0.5,
        description="An episode that another version sampled is consumed, untrained, if its "
        "effective sample size under the policy is below this share of its tokens. 0: never.",
    )
    min_overlap: Annotated[Number, Field(ge=0, lt=1)] = Field(
        default=0.8,
        description="Smallest overlap of the policies before and after an update; a larger step is "
        "halved until it fits. The overlap is the mean of min(1, after/before) over parts of four "
        "tokens of replies. 0: no limit.",
    )
    max_drift: Positive = Field(
        default=0.1,
        description="Largest divergence of model server and trainer about the newest version, in "
        "nats per token; an update past it is not applied.",
    )

    @model_validator(mode="after")
    def _bounds_include_one(self) -> "OffPolicyOptions":
        if not self.sequence_min <= 1.0 <= self.sequence_max:
            raise ValueError("sequence_min must not be above 1, nor sequence_max below it")
        return self

    def sequence_bounds(self, tokens: int) -> tuple[float, float]:
        """Return lower and upper limit of the geometric mean ratio of a call of `tokens` tokens."""
        factor = sqrt(20 / tokens)
        return self.sequence_min**factor, exp(min(factor * log(self.sequence_max), 700.0))


class KlOptions(RecipeTable):
    """The table `[kl]`: a penalty on leaving the base model (`trainer.learners.kl`)."""

    coefficient: NotNegative = Field(default=0.0, description="Factor of the KL; 0 is without.")
    place: Literal["loss", "reward"] = Field(
        default="loss", description="Whether the penalty is part of the loss or of the reward."
    )


class PpoOptions(RecipeTable):
    """The table `[ppo]`: PPO's own numbers (arXiv:1707.06347); other learners ignore them."""

    clip: Annotated[Number, Field(gt=0, lt=1)] = Field(
        default=0.2, description="Ratios to the old policy are clipped to 1 ± clip."
    )
    value_learning_rate: Positive = Field(
        default=1e-2,
        description="Learning rate of the critic, whose values are shares of reward_range.",
    )
    gae_lambda: Share = Field(
        default=1.0,
        description="GAE's λ, from token to token. Below 1 the early tokens of a long success get"
        " nearly nothing of its reward, until the critic has learned to expect it.",
    )
    epochs: Epochs = 2


class SftOptions(RecipeTable):
    """The table `[sft]`: episodes that the learner "sft" trains on; other learners ignore it."""

    min_reward: Number = Field(
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


class TeacherOptions(RecipeTable):
    """The table `[teacher]`: the model that "distill" trains towards, with the same tokenizer."""

    url: Annotated[str, Field(pattern=r"^https?://[^@\s]+$")] = Field(
        description="Base URL of the teacher's vLLM, with its /v1, as the trainer sees it; without "
        "a login: a key belongs into PAWL_TEACHER_API_KEY, which is recorded nowhere."
    )
    model: Text = Field(description="Name that this server has for the teacher.")
    finished_after_s: Seconds = Field(
        default=60.0,
        description="An episode without a reward is finished this long after its last call, and "
        "may be trained; one with a reward at once. Calls that come later are not trained.",
    )


class LoraOptions(RecipeTable):
    """The table `[lora]`: the adapter's shape."""

    rank: Count = Field(
        default=16, description="LoRA rank; not above the model server's --max-lora-rank."
    )
    alpha: Positive = Field(default=32.0, description="LoRA scale: updates count alpha / rank.")
    rslora: Annotated[bool, Field(strict=True)] = Field(
        default=False,
        description="Let updates count alpha / √rank instead (rsLoRA, arXiv:2312.03732), so that "
        "one alpha and learning rate serve every rank.",
    )
    target_modules: str | list[str] = Field(
        default=AUTO,
        description="Layers with an adapter, as PEFT names them. "
        '"auto" chooses by the architecture: every linear layer but the LM head and the routers of '
        "a mixture of experts.",
    )
    experts: Annotated[bool, Field(strict=True)] = Field(
        default=True,
        description='Whether "auto" adds the experts of a mixture, if the model server takes '
        "adapters of them. Each expert gets matrices of its own: of most mixtures they are nearly "
        "all that is trained, and each version is so much larger.",
    )


PublishMode = Literal["immediate", "evaluated", "canary"]


class PublishOptions(RecipeTable):
    """The table `[publish]`: the rules that decide which version gets the traffic."""

    mode: PublishMode = Field(
        default="immediate",
        description='What a version must do to get the traffic. "immediate": pass the probe. '
        '"evaluated": answer the tasks of `[evaluation]` no worse than the version that serves. '
        '"canary": do no worse on a share of the new episodes.',
    )
    approve: Annotated[bool, Field(strict=True)] = Field(
        default=False,
        description="Let a person give the traffic: the evidence is shown, and the version waits "
        "for `pawl policies promote`.",
    )
    control_share: Annotated[Number, Field(ge=0, le=0.5)] = Field(
        default=0.15,
        description="Share of new episodes for the control, an earlier version (at first the base "
        "model). If the serving version falls behind the control, it is rolled back; else a later "
        "version becomes the control. One half while training is held. 0: no control, and "
        "rewards roll nothing back.",
    )
    decide_within_h: Annotated[Number, Field(gt=0, le=720)] = Field(
        default=12.0,
        description='Hours in which the mode "canary" decides: the canary\'s share follows the '
        "traffic, up to one half, so that the evidence suffices by then.",
    )
    undecided: Literal["promote", "keep"] = Field(
        default="promote",
        description="Decision about a version that is still undecided after `decide_within_h`, or "
        '`evaluation.most_runs`. "promote": it gets the traffic unless its mean reward is lower so '
        'far (a canary\'s by more than half the margin). "keep": the serving version stays; and a '
        "version that loses more on a family of tasks than it gains on any other is rolled back.",
    )
    margin: Positive = Field(
        default=0.05,
        description="By how much the mean reward may be lower for a version to count as no worse, "
        "in units of the reward.",
    )
    reward_range: tuple[Number, Number] = Field(
        default=(0.0, 1.0),
        description="Lowest and highest reward; what lies outside counts as the nearest of them. "
        "An episode that failed counts as the lowest.",
    )
    reward_delay_s: Annotated[Number, Field(gt=0, le=LONGEST_DELAY_S)] = Field(
        default=600.0,
        description="Seconds after its beginning until an episode counts: its calls must have "
        "ended, and its reward have come, by then. What serves is watched by rewards as they come. "
        "One whose first call has not ended counts as failed. Set it longer than the longest call, "
        "and no shorter than `PAWL_SILENCE_S`.",
    )
    mistakes: Annotated[Number, Field(gt=0, lt=1)] = Field(
        default=0.05,
        description="Largest probability of a wrong decision about a version that is tried, over "
        "all looks.",
    )
    most_kl_to_base: Positive | None = Field(
        default=None,
        description="Largest KL of a version to its base model on the update's training data, in "
        "nats a token. A version above it is rejected before it has any traffic. Unset: none is "
        "rejected.",
    )
    tolerance: Positive = Field(
        default=0.15,
        description="Largest mean |served − trainer| log-probability of the probe's tokens, in "
        "nats. It is about 0.001 between float32 and float32, 0.05 if the server computes in bf16.",
    )
    wait_for_others_s: Seconds = Field(
        default=600.0,
        description="A version of a policy with publish_with waits this long for those of the "
        "others; then it goes live without them.",
    )

    @property
    def serves_at_once(self) -> bool:
        """Return whether a version that passes the probe gets the traffic without a decision."""
        return self.mode == "immediate" and not self.approve

    @field_validator("reward_delay_s", mode="before")
    @classmethod
    def _delay_is_at_most_a_week(cls, given: Any) -> Any:
        """Refuse a delay of more than a week with an error that names the remedy."""
        if isinstance(given, (int, float)) and given > LONGEST_DELAY_S:
            raise ValueError(
                f"{given:g} s is more than a week ({LONGEST_DELAY_S:g} s), and no episode would"
                " count before that: set the seconds after an episode's beginning by which its"
                " reward is there, such as 600; what comes later is trained on all the same"
            )
        return given

    @model_validator(mode="after")
    def _numbers_fit(self) -> "PublishOptions":
        lowest, highest = self.reward_range
        if lowest >= highest or not isfinite(highest - lowest):
            raise ValueError(
                "reward_range must be [lowest, highest] with lowest below highest, and their"
                " difference must be a finite number"
            )
        if self.margin >= highest - lowest:
            raise ValueError("margin must be smaller than the width of reward_range")
        if self.mode == "canary" and self.decide_within_h * 3600 <= self.reward_delay_s:
            raise ValueError(
                f"decide_within_h must be more than reward_delay_s, {self.reward_delay_s / 3600:g}"
                " hours: no episode would count before it"
            )
        return self


class EvaluationOptions(RecipeTable):
    """The table `[evaluation]`: held-out tasks that both versions answer in the mode "evaluated".

    Either `command` or `python` runs the agent, as in `pawl rollout`. Paths are relative to the
    controller's working directory.
    """

    tasks: Text = Field(description="File of tasks, one JSON object a line; `id` names a task.")
    command: Text | None = Field(
        default=None, description="Program that is started for each run, as in a shell."
    )
    python: Text | None = Field(
        default=None,
        description="MODULE:FUNCTION that is called for each run, instead of `command`.",
    )
    judge: Text | None = Field(
        default=None,
        description="Program that scores a run: task and output as JSON on its standard input, a "
        "number or an object of metrics on its standard output, of which `[reward]` makes one.",
    )
    answer: Text | None = Field(
        default=None,
        description="Field of the tasks that the last line of the output is compared with; the "
        "reward is 1 or 0. The agent does not get this field.",
    )
    tries: Count = Field(default=4, description="Runs of each task with each version.")
    most_runs: Count = Field(
        default=2000, description="Most runs of both versions together that one decision may cost."
    )
    timeout_s: Seconds = Field(default=600.0, description="Time limit of one run, in seconds.")
    url: Text | None = Field(
        default=None,
        description="Base URL of the proxy, as the controller sees it. Unset: that of the "
        "controller's own PAWL_LISTEN.",
    )

    @model_validator(mode="after")
    def _names_agent_and_scorer(self) -> "EvaluationOptions":
        if (self.command is None) == (self.python is None):
            raise ValueError(
                'command, python: say what to run with command = "PROGRAM ARGUMENTS" or python ='
                ' "MODULE:FUNCTION", one of the two'
            )
        if (self.judge is None) == (self.answer is None):
            raise ValueError(
                'judge, answer: say what scores a run with judge = "PROGRAM ARGUMENTS" or answer ='
                ' "FIELD", one of the two'
            )
        return self


class Recipe(RecipeTable):
    """A complete recipe; keys that the file leaves out have their defaults."""

    learner: Literal["grpo", "ppo", "sft", "distill"] = Field(
        default="grpo",
        description="Learning algorithm: GRPO, PPO with a critic, SFT on successful episodes, or "
        "on-policy distillation from a teacher, which needs no rewards.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="float32",
        description='Precision that the trainer computes in. "auto" is bfloat16 on a GPU and '
        "float32 on a CPU.",
    )
    base_bits: Literal[4, 8] | None = Field(
        default=None,
        description="Bits of a weight of the frozen base's linear layers, which bitsandbytes packs "
        "(QLoRA, arXiv:2305.14314). The model server serves the base as it is, so that its "
        "log-probabilities are further from the trainer's. Unset: all weights are in `dtype`.",
    )
    reward: dict[str, RewardOptions] = Field(default={})
    claim: ClaimOptions = ClaimOptions()
    credit: CreditOptions = CreditOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    batch: BatchOptions = BatchOptions()
    off_policy: OffPolicyOptions = OffPolicyOptions()
    kl: KlOptions = KlOptions()
    ppo: PpoOptions = PpoOptions()
    sft: SftOptions = SftOptions()
    teacher: TeacherOptions | None = None
    lora: LoraOptions = LoraOptions()
    publish: PublishOptions = PublishOptions()
    evaluation: EvaluationOptions | None = None

    @model_validator(mode="after")
    def _evaluation_fits_the_mode(self) -> "Recipe":
        """Refuse the mode "evaluated" without `[evaluation]`, and `[evaluation]` in other modes."""
        is_evaluated = self.publish.mode == "evaluated"
        if is_evaluated and self.evaluation is None:
            raise ValueError(
                'publish.mode = "evaluated" needs a section [evaluation], with tasks = "FILE", and'
                ' command = "PROGRAM ARGUMENTS" or python = "MODULE:FUNCTION"'
            )
        if not is_evaluated and self.evaluation is not None:
            raise ValueError(
                f'evaluation: it decides nothing with publish.mode = "{self.publish.mode}": set'
                ' publish.mode = "evaluated", or leave [evaluation] out'
            )
        return self

    @model_validator(mode="after")
    def _ppo_has_one_baseline(self) -> "Recipe":
        """Refuse for PPO, which has a critic, other baselines and normalising by their spread."""
        if self.learner != "ppo":
            return self
        credit = self.credit
        spread_over = NORMALISATIONS[credit.normalisation].spread_over
        if credit.compares_episodes or spread_over == "baseline":
            raise ValueError(
                'learner "ppo" has its critic as the baseline: set credit.baseline = "none" and '
                'credit.normalisation = "batch" (or "none")'
            )
        return self

    @model_validator(mode="after")
    def _sft_and_distill_compare_nothing(self) -> "Recipe":
        """Refuse a baseline, a normalisation or a KL in the reward for SFT and distillation."""
        if self.learner not in ("sft", "distill"):
            return self
        credit = self.credit
        if credit.compares_episodes or credit.normalisation != "none":
            raise ValueError(
                f'learner "{self.learner}" does not compare episodes: set credit.baseline ='
                ' "none" and credit.normalisation = "none"'
            )
        if self.kl.coefficient and self.kl.place == "reward":
            raise ValueError(
                f'learner "{self.learner}" has no reward in its loss: set kl.place = "loss"'
            )
        return self

    @model_validator(mode="after")
    def _teacher_fits_the_learner(self) -> "Recipe":
        """Refuse "distill" without a teacher or with groups, and a teacher for other learners."""
        if (self.learner == "distill") != (self.teacher is not None):
            raise ValueError(
                'teacher: learner "distill" needs a section [teacher], with url and model, and no'
                " other learner has a use for one"
            )
        if self.teacher is not None and self.claim.group_size != 1:
            raise ValueError('learner "distill" compares nothing: set claim.group_size = 1')
        return self

    @model_validator(mode="after")
    def _publish_fits_the_reward_sum(self) -> "Recipe":
        """Refuse a sum of `[reward]` without a finite range, and a range or margin unfit for it."""
        if not self.reward:
            return self
        low, high = self.reward_rule.range
        if not isfinite(high - low):
            raise ValueError("reward: the sum of the metrics has no finite range: use smaller ones")
        if self.publish.reward_range not in ((low, high), PublishOptions().reward_range):
            raise ValueError(
                f"publish.reward_range follows from [reward], whose sum is {low:g} to {high:g}:"
                " leave it out"
            )
        if self.publish.margin >= high - low:
            raise ValueError(
                "publish.margin must be smaller than the width of the sum of [reward],"
                f" {high - low:g}"
            )
        return self

    @property
    def reward_rule(self) -> RewardRule:
        """Return the rule that sums metrics to the reward; by default the metric `reward` alone."""
        if not self.reward:
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
                for metric, options in self.reward.items()
            )
        )

    @property
    def reward_range(self) -> tuple[float, float]:
        """Return the lowest and highest reward: of the sum in `[reward]`, else of `[publish]`."""
        return self.reward_rule.range if self.reward else self.publish.reward_range

    @property
    def failed_reward(self) -> float | None:
        """Return the reward that claiming assumes for a failed, unscored episode.

        None: it stays unscored. Credit may set a lower reward (`trainer.credit.returns`).
        """
        failed = self.credit.failed_reward
        if failed is None:
            return self.reward_range[0]
        return None if failed == "unscored" else failed

    @property
    def judged_by(self) -> dict[str, Any]:
        """Return the settings by which a version is judged, JSON-ready.

        They are those of `[publish]`, with the `reward_range` of the sum if `[reward]` names
        metrics; `evaluation`; and `reward`, the rule that sums metrics.
        """
        rule = self.publish.model_copy(update={"reward_range": self.reward_range})
        evaluation = None if self.evaluation is None else self.evaluation.model_dump(mode="json")
        reward = msgspec.to_builtins(self.reward_rule)
        return {**rule.model_dump(mode="json"), "evaluation": evaluation, "reward": reward}

    @property
    def imitation_rule(self) -> SftOptions | None:
        """Return the rule that selects episodes to imitate, or None if the learner is not "sft".

        The loss of SFT uses no ratios, so its rows may be sampled by any policy.
        """
        return self.sft if self.learner == "sft" else None


RECIPE_FILE: Final = TomlFile(Recipe, error=RecipeError)


def load_recipe(name_or_path: str) -> Recipe:
    """Return the recipe in a TOML file, or the packaged recipe of that name.

    Raises:
        RecipeError: there is no such recipe, or a key in it is wrong; the message names the key.
    """
    packaged = {
        Path(entry.name).stem: Path(str(entry))
        for entry in files("trainer.recipes").iterdir()
        if entry.name.endswith(".toml")
    }
    # Unlike `Path.exists`, `os.path.exists` never raises: a recipe's name may be an invalid path.
    if name_or_path.endswith(".toml") or os.path.exists(name_or_path):
        source = Path(name_or_path)
    elif name_or_path in packaged:
        source = packaged[name_or_path]
    else:
        raise RecipeError(
            f"there is no recipe {name_or_path!r:.80}: name a .toml file, or"
            f" {', '.join(sorted(packaged))}"
        )
    return parse_recipe(RECIPE_FILE.text_of(source, f"recipe {source}"), str(source))


def parse_recipe(text: str, where: str) -> Recipe:
    """Return the recipe in `text`; `where` names the source in error messages.

    Raises:
        RecipeError: the text is not TOML, or a key is wrong; the message names the key.
    """
    return RECIPE_FILE.parse(text, f"recipe {where}")
