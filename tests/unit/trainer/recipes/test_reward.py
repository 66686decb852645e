"""`[reward]` of a recipe: what is refused, what the gate makes of it, and what is recorded."""

import pytest

from trainer.errors import RecipeError
from trainer.recipes.recipe import Recipe, parse_recipe

SUM = '[reward.right]\nrange = [0, 2]\n[reward."cost in €"]\nweight = -0.5\nrange = [0, 4]\n'


@pytest.mark.parametrize(
    ("text", "named"),
    [
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
def test_what_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(RecipeError, match=named):
        parse_recipe(text, "test")


def test_the_gate_is_told_the_range_of_the_sum() -> None:
    recipe = parse_recipe(SUM, "test")
    assert recipe.judged_by.reward_range == (-2.0, 2.0)
    assert recipe.gate.reward_range == (0.0, 1.0)
    assert Recipe().judged_by == Recipe().gate


def test_a_sum_is_recorded_and_read_back_and_no_sum_leaves_no_trace() -> None:
    recipe = parse_recipe(SUM, "test")
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
    assert list(recipe.reward) == ["right", "cost in €"]
    assert "reward" not in Recipe().model_dump(mode="json")
    assert Recipe.model_validate(Recipe().model_dump(mode="json")) == Recipe()
