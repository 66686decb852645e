"""A recipe: which learner, and its numbers. TOML, every key known, every value in range."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from store.records import TOOL_STATUSES
from trainer.errors import RecipeError

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClaimPart(_Part):
    """Which episodes make an update (see `store.claims.ClaimRule`)."""

    group_size: Annotated[int, Field(ge=2)] = 8
    groups: Count = 16
    smallest_group: Annotated[int, Field(ge=2)] = 2
    max_age_s: Positive = 600.0
    max_staleness: Annotated[int, Field(ge=0)] = 4

    @model_validator(mode="after")
    def _smallest_is_no_larger(self) -> "ClaimPart":
        if self.smallest_group > self.group_size:
            raise ValueError("smallest_group must not be larger than group_size")
        return self


class CreditPart(_Part):
    """How returns become advantages (see `trainer.credit`)."""

    assignment: Literal["identical"] = "identical"
    smallest_spread: Positive = 0.1
    failed_reward: float | None = None
    air_lambda: Annotated[float, Field(ge=0, le=0.2)] = 0.2
    air_scores: dict[str, float] = Field(
        default={"ok": 1.0, "error": -0.5, "timeout": -0.5, "denied": -0.5, "malformed": -1.0}
    )

    @model_validator(mode="after")
    def _statuses_are_known(self) -> "CreditPart":
        if set(self.air_scores) != set(TOOL_STATUSES):
            known = ", ".join(TOOL_STATUSES)
            raise ValueError(f"air_scores must give a score to each of {known}, and to no other")
        failed = min(score for name, score in self.air_scores.items() if name != "malformed")
        if self.air_scores["malformed"] >= failed:
            raise ValueError("air_scores: malformed must score below one that failed cleanly")
        return self


class GrpoPart(_Part):
    """GRPO's numbers. `ratio_cap` truncates policy/sampled; `steps` optimiser steps an update."""

    learning_rate: Positive = 2e-4
    ratio_cap: Positive = 2.0
    max_grad_norm: Positive = 1.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    steps: Count = 1
    micro_batch_tokens: Annotated[int, Field(ge=64)] = 1024


class LoraPart(_Part):
    """The adapter's shape. `rank` must not exceed the server's --max-lora-rank."""

    rank: Count = 16
    alpha: Positive = 32.0
    target_modules: str | list[str] = "all-linear"


class PublishPart(_Part):
    """When a version counts as served right, and when an idle one is taken away.

    `tolerance` bounds the mean |served − trainer| log-probability of the probe's tokens, in
    nats: about 0.001 between float32 and float32, 0.05 where the server computes in bf16.
    """

    tolerance: Positive = 0.15
    probe_rows: Count = 4
    retire_after_s: Positive = 900.0


class Recipe(_Part):
    """All of it. Defaults stand for what a file leaves out."""

    learner: Literal["grpo"] = "grpo"
    dtype: Literal["float32", "bfloat16"] = "float32"
    claim: ClaimPart = ClaimPart()
    credit: CreditPart = CreditPart()
    grpo: GrpoPart = GrpoPart()
    lora: LoraPart = LoraPart()
    publish: PublishPart = PublishPart()


def load_recipe(name_or_path: str) -> Recipe:
    """The recipe in a TOML file, or the packaged one of that name (`default`, `demo`).

    Raises:
        RecipeError: there is none, or something in it is wrong; the message names the key.
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
    """The recipe in `text`; `where` names it in messages.

    Raises:
        RecipeError: see `load_recipe`.
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
    key = ".".join(str(part) for part in detail["loc"]) or "recipe"
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key!r}"
    return f"{key}: {detail['msg']}"
