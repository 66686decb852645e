"""Recipes: every key known, every value in range, and the message names what is not."""

from pathlib import Path

import pytest

from tests.conftest import ROOT
from trainer.errors import RecipeError
from trainer.recipes.recipe import GateOptions, Recipe, load_recipe, parse_recipe

EXAMPLES = [
    path
    for path in sorted(ROOT.glob("examples/*/*.toml"))
    if path.read_text().startswith("learner") or "\nlearner" in path.read_text()
]
SUM = '[reward.right]\nrange = [0, 2]\n[reward."cost in €"]\nweight = -0.5\nrange = [0, 4]\n'
SFT = "learner = 'sft'\n[credit]\nbaseline = 'none'\nnormalisation = 'none'"


# By packaged recipe: its learner, and whether it is for live traffic, where the base model keeps a
# share by which a version that falls behind is found. In a training run it gets no episodes.
PACKAGED = {
    **dict.fromkeys(("default", "single", "thinking"), ("grpo", True)),
    **dict.fromkeys(("rollout", "demo", "demo-single"), ("grpo", False)),
    "ppo": ("ppo", True),
    "demo-ppo": ("ppo", False),
    "sft": ("sft", True),
    "demo-sft": ("sft", False),
}


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_recipe_serves_each_version_at_once(name: str) -> None:
    recipe = load_recipe(name)
    learner, is_live = PACKAGED[name]
    assert recipe.learner == learner
    assert (recipe.gate.mode, recipe.gate.base_share) == ("immediate", 0.02 if is_live else 0.0)
    assert recipe.gate.is_watched is is_live
    # On live traffic the precision is the machine's.
    assert recipe.dtype == "auto" or not is_live


@pytest.mark.parametrize(
    "path", [*ROOT.glob("trainer/recipes/*.toml"), *EXAMPLES], ids=lambda path: path.stem
)
def test_a_failed_episode_is_an_outcome_in_every_recipe_that_comes_with_pawl(path: Path) -> None:
    assert load_recipe(str(path)).credit.failed_reward == 0.0


def test_recipe_for_thinking_weighs_each_token_the_same() -> None:
    recipe = load_recipe("thinking")
    assert recipe.credit.equal_weight == "token"
    rule = recipe.off_policy
    assert (rule.sequence_min, rule.sequence_max) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("hidden_size", "rate"),
    # SmolLM2-135M, for which the demo was measured at 2e-4; 8B and 70B models.
    [(576, 2.3e-4), (4096, 5e-5), (8192, 2.9e-5)],
)
def test_learning_rate_that_no_recipe_names_falls_with_the_models_width(
    hidden_size: int, rate: float
) -> None:
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
        ("[claim]\ngroup_size = 2\nsmallest_group = 4", "smallest_group"),
        ("[credit]\nair_lambda = 0.3", "credit.air_lambda"),
        ("[credit.air_scores]\nok = 1", "air_scores"),
        (
            "[credit.air_scores]\nok=1\nerror=-1\ntimeout=-1\ndenied=-1\nmalformed=-1",
            "malformed must score below",
        ),
        ("learner = 'magic'", "learner"),
        ("[claim]\ngroup_size = 1", "claim.group_size = 1 .* credit.baseline = 'group'"),
        (
            "[claim]\ngroup_size = 1\n[credit]\nbaseline = 'leave_one_out'",
            "credit.baseline = 'leave_one_out'",
        ),
        ("[claim]\nsmallest_group = 1", "claim.smallest_group = 1 cannot work"),
        ("learner = 'ppo'", 'set credit.baseline = "none" and credit.normalisation = "batch"'),
        ("learner = 'ppo'\n[credit]\nbaseline = 'none'", 'credit.normalisation = "batch"'),
        ("[ppo]\nclip = 1.0", "ppo.clip"),
        ("learner = 'sft'", 'set credit.baseline = "none" and credit.normalisation = "none"'),
        (SFT.replace("normalisation = 'none'", ""), 'credit.normalisation = "none"'),
        (f"{SFT}\n[kl]\ncoefficient = 0.1\nplace = 'reward'", 'set kl.place = "loss"'),
        (f"{SFT}\n[sft]\nmost_per_task = 0", "sft.most_per_task"),
        (f"{SFT}\n[sft]\nmin_reward = inf", "sft.min_reward"),
        ("[off_policy]\nratio_cap = inf", "off_policy.ratio_cap"),
        ("[kl]\nplace = 'prompt'", "kl.place"),
        ("[gate]\nmode = 'never'", "gate.mode"),
        ("[gate]\ncanary = 0.1", "unknown key 'gate.canary': did you mean canary_share"),
        ("[gate]\ncanary_share = 0.0", "gate.canary_share"),
        ("[gate]\ncanary_share = 0.6", "gate.canary_share"),
        ("[gate]\ncanary_share = 0.5\nbase_share = 0.5", r"canary_share \+ base_share"),
        ("[gate]\nreward_range = [1, 0]", "reward_range must be"),
        ("[gate]\nreward_range = [0, 1, 2]", "gate.reward_range"),
        ("[gate]\nreward_range = [0, inf]", "gate.reward_range"),
        ("[gate]\nreward_range = [-1e308, 1e308]", "reward_range must be"),
        ("[gate]\nmargin = 1.0", "margin must be smaller"),
        ("[gate]\ndeadline_s = 600", "deadline_s must be larger than reward_delay_s"),
        ("[gate]\nreward_delay_s = 0", "gate.reward_delay_s"),
        ("[gate]\nreward_delay_s = 604801\ndeadline_s = 1e9", "gate.reward_delay_s.* a week"),
        ("[gate]\nreward_delay_s = inf", "gate.reward_delay_s.* a week"),
        ("[gate]\nmistakes = 0", "gate.mistakes"),
        ("[gate]\nfewest = 0", "gate.fewest"),
        ("[gate]\nupdates_per_candidate = 0", "gate.updates_per_candidate"),
        ("[gate]\nreplay_states = -1", "gate.replay_states"),
        ("[gate]\nreplay_tokens = 0", "gate.replay_tokens"),
        ("[gate]\nmost_kl_to_serving = 0.0", "gate.most_kl_to_serving"),
        ("[gate]\nmost_kl_to_serving = inf", "gate.most_kl_to_serving"),
        ("[gate]\nmost_malformed = 1.5", "gate.most_malformed"),
        ("[gate]\nmost_kl_to_base = 0.0", "gate.most_kl_to_base"),
        ("[gate]\nmost_kl_to_base = inf", "gate.most_kl_to_base"),
        ("[claim", "not TOML"),
        ("[reward.right]\n", "reward.right.range"),
        ("[reward.right]\nrange = [1, 1]\n", "lowest below highest"),
        ("[reward.right]\nrange = [0, 1]\nweight = 0\n", "weight must not be 0"),
        ("[reward.right]\nrange = [0, 1]\ndefault = 2\n", "default is 2.0, outside"),
        ("[reward.right]\nrange = [0, 1]\nvalues = {good = 3}\n", "values.good is 3.0, outside"),
        ('[reward.right]\nrange = [0, 1]\nvalues = {"" = 1}\n', "1 to 256 characters"),
        ("[reward.right]\nrange = [0, 1]\nwieght = 1\n", "did you mean weight"),
        (SUM + "[gate]\nreward_range = [0, 5]\n", "gate.reward_range follows from"),
        ("[reward.right]\nrange = [0, 0.01]\n", "gate.margin must be smaller"),
        ("[reward]\nrange = [0, 1]\n", "reward.range"),
    ],
)
def test_wrong_key_or_value_is_named(text: str, named: str) -> None:
    with pytest.raises(RecipeError, match=named):
        parse_recipe(text, "r.toml")


@pytest.mark.parametrize("baseline", ["moving", "none"])
def test_groups_of_one_want_a_baseline_that_needs_no_group(baseline: str) -> None:
    found = parse_recipe(f"[claim]\ngroup_size = 1\n[credit]\nbaseline = '{baseline}'", "r.toml")
    assert (found.claim.group_size, found.claim.smallest_group) == (1, 1)


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError,
        match="default, demo, demo-ppo, demo-sft, demo-single, ppo, rollout, sft, single, thinking",
    ):
        load_recipe("nope")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(str(tmp_path / "nope.toml"))


def test_the_base_model_gets_episodes_without_a_gate_only_if_the_recipe_says_so() -> None:
    untried = parse_recipe("", "r.toml").gate
    assert (untried.base_share, untried.is_watched) == (0.0, False)
    watched = parse_recipe("[gate]\nbase_share = 0.1", "r.toml").gate
    assert (watched.base_share, watched.is_watched) == (0.1, True)
    gated = parse_recipe("[gate]\nmode = 'gated'", "r.toml").gate
    assert (gated.base_share, gated.is_watched) == (0.02, False)
    for one in (untried, watched, gated):
        assert GateOptions.model_validate(one.model_dump(mode="json")) == one


def test_the_recipe_of_a_training_run_differs_from_that_of_live_traffic_by_its_gate_alone() -> None:
    live, run = load_recipe("default"), load_recipe("rollout")
    assert live != run
    assert live.model_copy(update={"gate": run.gate}) == run


def test_a_gate_has_its_options() -> None:
    found = parse_recipe("[gate]\nmode = 'gated'\nreward_range = [-1, 2]\nmargin = 1.5", "r.toml")
    assert found.gate.is_gated
    assert (found.gate.reward_range, found.gate.margin) == ((-1.0, 2.0), 1.5)
    # The controller reads them from the store, where they are JSON.
    assert GateOptions.model_validate(found.gate.model_dump(mode="json")) == found.gate


def test_empty_recipe_has_float32_and_no_gate() -> None:
    empty = parse_recipe("", "r.toml")
    assert empty.dtype == "float32"
    assert not empty.gate.is_gated
    assert empty.gate.most_kl_to_base is None


def test_gate_has_the_range_of_the_sum() -> None:
    recipe = parse_recipe(SUM, "test")
    assert recipe.judged_by.reward_range == (-2.0, 2.0)
    assert recipe.gate.reward_range == (0.0, 1.0)
    assert Recipe().judged_by == Recipe().gate


def test_sum_is_recorded_and_read_back_and_no_sum_leaves_no_trace() -> None:
    recipe = parse_recipe(SUM, "test")
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
    assert list(recipe.reward) == ["right", "cost in €"]
    assert "reward" not in Recipe().model_dump(mode="json")
    assert Recipe.model_validate(Recipe().model_dump(mode="json")) == Recipe()
