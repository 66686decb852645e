"""Read recipes: which learner to use, and its numbers, as TOML with known keys and ranges."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from store.table_file import instead
from store.values.rewards import RewardRule
from trainer.credit.baselines.registry import baselines
from trainer.credit.normalisations.registry import normalisations
from trainer.errors import RecipeError
from trainer.recipes.adapter import LoraOptions, PublishOptions
from trainer.recipes.claim import ClaimOptions
from trainer.recipes.credit import CreditOptions
from trainer.recipes.gate import GateOptions
from trainer.recipes.options import RecipeOptions
from trainer.recipes.reward import RewardOptions, rule_of
from trainer.recipes.training import (
    BatchOptions,
    KlOptions,
    OffPolicyOptions,
    OptimizerOptions,
    PpoOptions,
    SftOptions,
)


class Recipe(RecipeOptions):
    """Hold a complete recipe; keys that a file leaves out have their defaults."""

    learner: Literal["grpo", "ppo", "sft"] = Field(
        default="grpo",
        description="Learning algorithm: GRPO, PPO with a critic, or SFT on successful episodes.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="float32",
        description='Precision that the trainer computes in. "auto" is bfloat16 on a GPU and '
        "float32 on a CPU.",
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
    lora: LoraOptions = LoraOptions()
    publish: PublishOptions = PublishOptions()
    gate: GateOptions = GateOptions()

    @model_validator(mode="after")
    def _groups_are_compared(self) -> "Recipe":
        """Refuse groups of one with a baseline that compares an episode with its group."""
        if baselines()[self.credit.baseline].needs_group and self.claim.smallest_group == 1:
            others = [f'"{name}"' for name, one in baselines().items() if not one.needs_group]
            key = "group_size" if self.claim.group_size == 1 else "smallest_group"
            raise ValueError(
                f"claim.{key} = 1 cannot work with credit.baseline = {self.credit.baseline!r}: "
                "an episode that is alone has no group to be compared with; set "
                f"credit.baseline to {' or '.join(others)}, or the size to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _ppo_has_one_baseline(self) -> "Recipe":
        """Refuse group baselines for PPO: its critic is the baseline, over all of an update."""
        if self.learner != "ppo":
            return self
        credit = self.credit
        has_another = not baselines()[credit.baseline].is_zero
        if has_another or normalisations()[credit.normalisation].spread_over == "baseline":
            raise ValueError(
                'learner "ppo" has its critic as the baseline: set credit.baseline = "none" and '
                'credit.normalisation = "batch" (or "none")'
            )
        if credit.assignment == "discounted" and self.ppo.gamma < 1:
            raise ValueError(
                'credit.assignment = "discounted" and ppo.gamma < 1 would discount twice: '
                'set ppo.gamma = 1.0 or credit.assignment = "identical"'
            )
        return self

    @model_validator(mode="after")
    def _sft_compares_nothing(self) -> "Recipe":
        """Refuse for SFT what it would leave without effect, or would lose episodes by."""
        if self.learner != "sft":
            return self
        credit = self.credit
        if not baselines()[credit.baseline].is_zero or credit.normalisation != "none":
            raise ValueError(
                'learner "sft" compares episodes with none: set credit.baseline = "none" and '
                'credit.normalisation = "none"'
            )
        if credit.assignment == "discounted":
            raise ValueError(
                'learner "sft" trains all calls of an episode alike: set credit.assignment to '
                '"identical", or another that does not discount'
            )
        if self.kl.coefficient and self.kl.place == "reward":
            raise ValueError('learner "sft" has no reward in its loss: set kl.place = "loss"')
        return self

    @model_validator(mode="after")
    def _gate_knows_the_range(self) -> "Recipe":
        """Refuse for the gate another range of rewards than the sum has."""
        if not self.reward:
            return self
        low, high = self.reward_rule.range
        if self.gate.reward_range not in ((low, high), GateOptions().reward_range):
            raise ValueError(
                f"gate.reward_range follows from [reward], whose sum is {low:g} to {high:g}: leave"
                " it out"
            )
        if self.gate.margin >= high - low:
            raise ValueError(
                f"gate.margin must be smaller than the width of the sum of [reward], {high - low:g}"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_an_empty_sum(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave `reward` out where no metric is named: such recipes are recorded as ever."""
        values: dict[str, Any] = handler(self)
        if not self.reward:
            values.pop("reward", None)
        return values

    @property
    def reward_rule(self) -> RewardRule:
        """Return what the reward is the sum of."""
        return rule_of(self.reward)

    @property
    def judged_by(self) -> GateOptions:
        """Return the rule of the gate, with the range of the sum where `[reward]` names metrics."""
        if not self.reward:
            return self.gate
        return self.gate.model_copy(update={"reward_range": self.reward_rule.range})

    @property
    def kept(self) -> SftOptions | None:
        """Return the rule by which episodes are kept for training; None: all that give a signal.

        Such a learner has no ratio: what its rows were sampled from makes no difference.
        """
        return self.sft if self.learner == "sft" else None


def load_recipe(name_or_path: str) -> Recipe:
    """Return the recipe in a TOML file, or the packaged recipe of that name.

    Raises:
        RecipeError: there is no such recipe, or a key in it is wrong; the message names the key.
    """
    path = Path(name_or_path)
    packaged = files("trainer.recipes") / f"{name_or_path}.toml"
    if path.suffix == ".toml" or path.exists():
        source = path
    elif packaged.is_file():
        source = Path(str(packaged))
    else:
        known = ", ".join(sorted(entry.stem for entry in Path(str(packaged)).parent.glob("*.toml")))
        raise RecipeError(f"there is no recipe {name_or_path!r}: name a .toml file, or {known}")
    try:
        return parse_recipe(source.read_text(), str(source))
    except OSError as error:
        raise RecipeError(f"recipe {source} cannot be read: {error.strerror}") from error


def parse_recipe(text: str, where: str) -> Recipe:
    """Return the recipe in `text`; `where` names the source in error messages.

    Raises:
        RecipeError: the text is not TOML, or a key is wrong; the message names the key.
    """
    try:
        values: dict[str, Any] = tomllib.loads(text)
        return Recipe.model_validate(values)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {where} is not TOML: {error}") from error
    except ValidationError as error:
        problems = "; ".join(_problem(detail) for detail in error.errors())
        raise RecipeError(f"recipe {where}: {problems}") from error


def _problem(detail: Any) -> str:
    path = [str(part) for part in detail["loc"]]
    key = ".".join(path) or "recipe"
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key!r}: {instead(Recipe, path)}"
    return f"{key}: {detail['msg'].removeprefix('Value error, ')}"
