"""Write the page of recipes: every key, and how the packaged recipes differ."""

from importlib.resources import files
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.credit.baselines.registry import baselines
from trainer.recipes.options import RecipeOptions
from trainer.recipes.recipe import Recipe, parse_recipe
from trainer.recipes.reward import RewardOptions

from .fields import as_toml, default_of, meaning_of, type_of
from .markdown import code, page, paragraph, sentence, table, table_with_notes

INTRODUCTION: Final = """
A recipe says which learner to use, and with which numbers. It is a TOML file with the keys below;
keys that are left out have their defaults. `PAWL_RECIPE` names a file, or one of the packaged
recipes. An unknown key, or a value outside its limits, is an error at the trainer's start; the
message names the key. `pawl credit --recipe` takes the same names and files.
"""
PACKAGED: Final = """
Values of the packaged recipes, for keys in which one of them differs from the key's default. Empty:
the default. `default` is used if nothing else is set.
"""
SUM: Final = """
A table for each metric of `/feedback` that the reward is the sum of, such as `[reward.quality]`.
Without any it is the metric `reward`. A sum needs a value of each metric without a `default`.
"""
# Keys of the top level, whose fields have no description of their own.
TOP: Final = {
    "learner": 'Learning algorithm: GRPO, PPO with a critic (its keys: "ppo"), or SFT on successes '
    '(its keys: "sft").',
    "dtype": "Precision that the trainer computes in. "
    "`auto` is bfloat16 on a GPU and float32 on a CPU.",
}
RULES: Final = """
Some keys are checked together. `claim.smallest_group` must not exceed `claim.group_size`, and
`claim.max_episode_age_s` must exceed `claim.max_age_s`. A baseline that compares within a group
({grouped}) needs groups of two or more. `learner = "ppo"` needs `credit.baseline = "none"` and a
`credit.normalisation` other than `group`, and allows one discount only: `credit.assignment =
"discounted"` or `ppo.gamma` below 1. `learner = "sft"` needs `credit.baseline = "none"` and
`credit.normalisation = "none"`, and allows neither `credit.assignment = "discounted"` nor
`kl.place = "reward"`. With a decaying `optimizer.schedule`, `warmup_steps` must be
smaller than `total_steps`. `off_policy.sequence_min` to `sequence_max` must contain 1. A malformed
tool call must score below every clean failure of any tool. `gate.margin` must be smaller than the
width of `gate.reward_range`, `gate.canary_share + gate.base_share` below 1, and `gate.deadline_s`
must exceed `gate.reward_delay_s`. Where `[reward]` names metrics, the range of their sum is that of
the gate, and `gate.reward_range` is left out.
"""


def recipe_page() -> str:
    """Return `recipe.md`."""
    fields = Recipe.model_fields
    top = {name: field for name, field in fields.items() if name in TOP}
    tables = [(name, field) for name, field in fields.items() if _is_table(field)]
    return page(
        "Recipe",
        paragraph(INTRODUCTION),
        "## Top level",
        _keys(top),
        "## `[reward.METRIC]`",
        paragraph(SUM),
        _keys(RewardOptions.model_fields),
        *(_section(name, field) for name, field in tables),
        "## Checks across keys",
        paragraph(RULES.format(grouped=_grouped_baselines())),
        "## Packaged recipes",
        paragraph(PACKAGED),
        _packaged(),
    )


def _grouped_baselines() -> str:
    return ", ".join(code(name) for name, one in baselines().items() if one.needs_group)


def _is_table(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, RecipeOptions)


def _section(name: str, field: FieldInfo) -> str:
    part = field.annotation
    assert isinstance(part, type)
    assert issubclass(part, RecipeOptions)
    summary = (part.__doc__ or "").strip().split("\n\n")[0].partition(": ")[2]
    return "\n\n".join([f"## `[{name}]`", paragraph(sentence(summary)), _keys(part.model_fields)])


def _keys(fields: dict[str, FieldInfo]) -> str:
    rows = [
        (code(name), type_of(field), default_of(field), _meaning(name, field))
        for name, field in fields.items()
    ]
    return table_with_notes(("key", "type, limits", "default", "meaning"), rows)


def _meaning(name: str, field: FieldInfo) -> str:
    return field.description or TOP.get(name) or meaning_of(field)


def packaged_recipes() -> dict[str, Recipe]:
    """Return the packaged recipes by name, `default` first."""
    entries = [one for one in files("trainer.recipes").iterdir() if one.name.endswith(".toml")]
    names = sorted((one.name.removesuffix(".toml"), one.read_text()) for one in entries)
    ordered = sorted(names, key=lambda pair: pair[0] != "default")
    return {name: parse_recipe(text, name) for name, text in ordered}


def _packaged() -> str:
    values = {name: _flat(recipe) for name, recipe in packaged_recipes().items()}
    default = _flat(Recipe())
    differing = [key for key in default if any(one[key] != default[key] for one in values.values())]
    rows = [
        [
            code(key),
            _shown(default[key]),
            *(_differing(one, default, key) for one in values.values()),
        ]
        for key in differing
    ]
    return table(["key", "key's default", *(code(name) for name in values)], rows)


def _differing(values: dict[str, Any], default: dict[str, Any], key: str) -> str:
    return "" if values[key] == default[key] else _shown(values[key])


def _shown(value: object) -> str:
    return "unset" if value is None else as_toml(value).strip('"')


def _flat(recipe: BaseModel) -> dict[str, Any]:
    """Return a recipe's values by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in recipe:
        if name == "reward":
            continue
        if isinstance(value, RecipeOptions):
            flat |= {f"{name}.{key}": one for key, one in value}
        else:
            flat[name] = value
    return flat
