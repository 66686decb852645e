"""Recipes: every key known, every value in range, and the message names what is not."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from store.values.rewards import REWARD_ALONE
from tests.conftest import ROOT
from trainer.errors import RecipeError
from trainer.recipes.recipe import PublishOptions, Recipe, load_recipe, parse_recipe

EXAMPLES = [
    path
    for path in sorted(ROOT.glob("examples/*/*.toml"))
    if path.read_text().startswith("learner") or "\nlearner" in path.read_text()
]
SUM = '[reward.right]\nrange = [0, 2]\n[reward."cost in €"]\nweight = -0.5\nrange = [0, 4]\n'
EVALUATED = "[publish]\nmode = 'evaluated'\n[evaluation]\n"
TEACHER = "[teacher]\nurl = 'http://h:1/v1'\nmodel = 'big'\n"
DISTILL = (
    "learner = 'distill'\n[claim]\ngroup_size = 1\n"
    f"[credit]\nbaseline = 'none'\nnormalisation = 'none'\n{TEACHER}"
)
SFT = "learner = 'sft'\n[credit]\nbaseline = 'none'\nnormalisation = 'none'"


# By packaged recipe: its learner.
PACKAGED = {"default": "grpo", "rollout": "grpo", "ppo": "ppo", "sft": "sft"}


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_recipe_serves_each_version_at_once(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.learner == PACKAGED[name]
    assert recipe.publish.serves_at_once
    # In a training run over tasks every new episode gets the newest version.
    assert recipe.publish.control_share == (0.0 if name == "rollout" else 0.15)
    assert recipe.dtype == "auto"


@pytest.mark.parametrize(
    "path", [*ROOT.glob("trainer/recipes/*.toml"), *EXAMPLES], ids=lambda path: path.stem
)
def test_a_failed_episode_is_an_outcome_in_every_recipe_that_comes_with_pawl(path: Path) -> None:
    recipe = load_recipe(str(path))
    assert recipe.credit.failed_reward is None
    assert recipe.failed_reward == recipe.reward_range[0]


@pytest.mark.parametrize(
    ("section", "low"),
    [
        ({"publish": {"reward_range": [-2.0, 1.0]}}, -2.0),
        ({"reward": {"cost": {"weight": -1.0, "range": [0, 3]}}}, -3.0),
        ({"credit": {"failed_reward": -1.0}}, -1.0),
        ({"credit": {"failed_reward": "unscored"}}, None),
    ],
)
def test_failed_episode_gets_the_lowest_reward_unless_the_recipe_says_otherwise(
    section: dict[str, Any], low: float | None
) -> None:
    assert Recipe.model_validate(section).failed_reward == low


@pytest.mark.parametrize(
    ("hidden_size", "rate"),
    # SmolLM2-135M, for which the demo was measured at 2e-4; 8B and 70B models.
    [(576, 2.3e-4), (4096, 5e-5), (8192, 2.9e-5)],
)
def test_default_learning_rate_falls_with_the_models_width(hidden_size: int, rate: float) -> None:
    assert Recipe().optimizer.rate_for(hidden_size) == pytest.approx(rate, rel=0.02)
    assert parse_recipe("[optimizer]\nlearning_rate = 1e-3", "r").optimizer.rate_for(64) == 1e-3


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "[optimizer]\nlerning_rate = 1",
            "unknown key 'optimizer.lerning_rate': did you mean learning_rate",
        ),
        ("zzz = 1", "unknown key 'zzz': there are learner, dtype, "),
        ("colour = 1", "unknown key 'colour'"),
        ("[optimizer]\nlearning_rate = 0", "optimizer.learning_rate"),
        ("[optimizer]\nlearning_rate = 'fast'", "optimizer.learning_rate"),
        ("[claim]\ngroup_size = 0", "claim.group_size"),
        ("[claim]\nsmallest_group = 4", "unknown key 'claim.smallest_group'"),
        ("[credit]\nair_lambda = 0.3", "credit.air_lambda"),
        ("[credit.air_scores]\nok = 1", "air_scores"),
        (
            "[credit.air_scores]\nok=1\nerror=-1\ntimeout=-1\ndenied=-1\nmalformed=-1",
            "malformed must score below",
        ),
        ("learner = 'magic'", "learner"),
        ("[credit]\nbaseline = 'moving'", "'moving' is not known: use one of group, leave_one_out"),
        ("learner = 'ppo'", 'set credit.baseline = "none" and credit.normalisation = "batch"'),
        ("learner = 'ppo'\n[credit]\nbaseline = 'none'", 'credit.normalisation = "batch"'),
        ("[ppo]\nclip = 1.0", "ppo.clip"),
        ("learner = 'sft'", 'set credit.baseline = "none" and credit.normalisation = "none"'),
        (SFT.replace("normalisation = 'none'", ""), 'credit.normalisation = "none"'),
        (f"{SFT}\n[kl]\ncoefficient = 0.1\nplace = 'reward'", 'set kl.place = "loss"'),
        (f"{SFT}\n[sft]\nmost_per_task = 0", "sft.most_per_task"),
        (f"{SFT}\n[sft]\nmin_reward = inf", "sft.min_reward"),
        (DISTILL.replace(TEACHER, ""), r"needs a section \[teacher\], with url and model"),
        (TEACHER, r"teacher: .* no other learner has a use for one"),
        (DISTILL.replace("group_size = 1", ""), "set claim.group_size = 1"),
        (DISTILL.replace("baseline = 'none'", ""), 'set credit.baseline = "none" and'),
        (f"{DISTILL}[kl]\ncoefficient = 0.1\nplace = 'reward'", 'set kl.place = "loss"'),
        (DISTILL.replace("http:", "ftp:"), "teacher.url"),
        (DISTILL.replace("h:1", "me:secret@h:1"), "teacher.url"),
        (DISTILL.replace("model = 'big'", ""), "teacher.model"),
        ("[off_policy]\nratio_cap = inf", "off_policy.ratio_cap"),
        ("[kl]\nplace = 'prompt'", "kl.place"),
        ("[publish]\nmode = 'gated'", "publish.mode"),
        ("[publish]\napprove = 1", "publish.approve"),
        ("[publish]\ncontrol_shar = 0.1", "'publish.control_shar': did you mean control_share"),
        ("[publish]\ncontrol_share = 0.6", "publish.control_share"),
        ("[publish]\nreward_range = [1, 0]", "reward_range must be"),
        ("[publish]\nreward_range = [0, 1, 2]", "publish.reward_range"),
        ("[publish]\nreward_range = [0, inf]", "publish.reward_range"),
        ("[publish]\nreward_range = [-1e308, 1e308]", "reward_range must be"),
        ("[publish]\nmargin = 1.0", "margin must be smaller"),
        (
            "[publish]\nmode = 'canary'\ndecide_within_h = 0.1",
            "decide_within_h must be more than reward_delay_s",
        ),
        ("[publish]\ndecide_within_h = 1000", "publish.decide_within_h"),
        ("[publish]\nreward_delay_s = 0", "publish.reward_delay_s"),
        ("[publish]\nreward_delay_s = 604801", "publish.reward_delay_s.* a week"),
        ("[publish]\nreward_delay_s = inf", "publish.reward_delay_s.* a week"),
        ("[publish]\nmistakes = 0", "publish.mistakes"),
        ("[publish]\nundecided = 'wait'", "publish.undecided"),
        ("[publish]\nmost_kl_to_base = 0.0", "publish.most_kl_to_base"),
        ("[publish]\nmost_kl_to_base = inf", "publish.most_kl_to_base"),
        ("[publish]\nmode = 'evaluated'", r"needs a section \[evaluation\], with tasks"),
        (EVALUATED, "evaluation.tasks: Field required"),
        (f"{EVALUATED}tasks = ''\ncommand = 'a'", "evaluation.tasks"),
        (f"{EVALUATED}tasks = 't'", "evaluation: command, python: say what to run"),
        (f"{EVALUATED}tasks = 't'\ncommand = 'a'\npython = 'a:b'", "one of the two"),
        (f"{EVALUATED}tasks = 't'\ncommand = 'a'\njudge = 'j'\nanswer = 'f'", "judge, answer"),
        (f"{EVALUATED}tasks = 't'\ncommand = 'a'", "judge, answer: say what scores a run"),
        (f"{EVALUATED}tasks = 't'\ncommand = 'a'\ntries = 0", "evaluation.tries"),
        (
            "[evaluation]\ntasks = 't'\ncommand = 'a'\nanswer = 'f'",
            "evaluation: it decides nothing with",
        ),
        ("[claim", "not TOML"),
        ("[reward.right]\n", "reward.right.range"),
        ("[reward.right]\nrange = [1, 1]\n", "lowest below highest"),
        ("[reward.right]\nrange = [0, 1]\nweight = 0\n", "weight must not be 0"),
        ("[reward.right]\nrange = [0, 1]\ndefault = 2\n", "default is 2.0, outside"),
        ("[reward.right]\nrange = [0, 1]\nvalues = {good = 3}\n", "values.good is 3.0, outside"),
        ('[reward.right]\nrange = [0, 1]\nvalues = {"" = 1}\n', "1 to 256 characters"),
        ("[reward.right]\nrange = [0, 1]\nwieght = 1\n", "did you mean weight"),
        (SUM + "[publish]\nreward_range = [0, 5]\n", "publish.reward_range follows from"),
        ("[reward.right]\nrange = [0, 0.01]\n", "publish.margin must be smaller"),
        ("[reward]\nrange = [0, 1]\n", "reward.range"),
    ],
)
def test_wrong_key_or_value_of_a_recipe_is_named(text: str, named: str) -> None:
    with pytest.raises(RecipeError, match=named):
        parse_recipe(text, "r.toml")


def test_missing_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError,
        match="default, ppo, rollout, sft",
    ):
        load_recipe("nope")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(str(tmp_path / "nope.toml"))


def test_the_recipe_of_a_training_run_differs_from_that_of_live_traffic_by_its_control() -> None:
    live, run = load_recipe("default"), load_recipe("rollout")
    assert live.publish.model_copy(update={"control_share": 0.0}) == run.publish
    assert live.model_copy(update={"publish": run.publish}) == run


@pytest.mark.parametrize(
    ("text", "serves_at_once"),
    [
        ("", True),
        ("[publish]\napprove = true", False),
        ("[publish]\nmode = 'canary'", False),
        (f"{EVALUATED}tasks = 't'\npython = 'a:b'\nanswer = 'right'", False),
    ],
)
def test_version_serves_at_once_only_if_the_recipe_asks_for_no_decision(
    text: str, serves_at_once: bool
) -> None:
    recipe = parse_recipe(text, "r.toml")
    assert recipe.publish.serves_at_once is serves_at_once
    # The update's recipe is read back from the store, where it is JSON.
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_empty_recipe_has_float32_and_no_bound_on_the_kl() -> None:
    empty = parse_recipe("", "r.toml")
    assert empty.dtype == "float32"
    assert empty.publish.most_kl_to_base is None


def test_versions_are_judged_by_the_reward_range_of_the_sum_and_by_the_evaluation() -> None:
    recipe = parse_recipe(f"{SUM}{EVALUATED}tasks = 't'\npython = 'a:b'\nanswer = 'f'", "test")
    assert recipe.judged_by["reward_range"] == [-2.0, 2.0]
    assert recipe.judged_by["evaluation"]["tasks"] == "t"
    assert recipe.publish.reward_range == (0.0, 1.0)
    plain = Recipe().publish.model_dump(mode="json")
    reward = msgspec.to_builtins(REWARD_ALONE)
    assert Recipe().judged_by == {**plain, "evaluation": None, "reward": reward}
    assert PublishOptions.model_validate(plain) == Recipe().publish


def test_recipes_sum_of_metrics_is_recorded_and_read_back() -> None:
    recipe = parse_recipe(SUM, "test")
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
    assert list(recipe.reward) == ["right", "cost in €"]
    assert Recipe.model_validate(Recipe().model_dump(mode="json")) == Recipe()
