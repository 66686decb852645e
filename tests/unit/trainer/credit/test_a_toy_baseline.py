"""A baseline is a class and its name in a table: recipes may name it, and nothing else changes."""

from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.docs.documents import split_blocks
from tests.support.lines import credited, episode
from trainer.credit import baselines
from trainer.credit.baselines import BASELINES
from trainer.errors import RecipeError
from trainer.recipes.recipe import CreditOptions, parse_recipe

RECIPE = '[credit]\nbaseline = "best"\nnormalisation = "none"'


@pytest.fixture
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline of the guide, beside those that come with Pawl."""
    page = ROOT / "docs/howto/add-a-baseline.md"
    [code] = [one for one in split_blocks(page, page.read_text())[1] if one.language == "python"]
    defined: dict[str, Any] = dict(vars(baselines))
    exec(code.text, defined)
    monkeypatch.setitem(BASELINES, "best", defined["BestOfGroup"]())


def test_the_baselines_that_come_with_pawl() -> None:
    assert sorted(BASELINES) == ["group", "leave_one_out", "moving", "none"]


def test_a_name_that_is_not_in_the_table_is_refused_with_those_that_are() -> None:
    with pytest.raises(RecipeError, match=r"credit\.baseline: .*'best' is not known: use one of"):
        parse_recipe(RECIPE, "r.toml")


@pytest.mark.usefixtures("_toy")
def test_a_recipe_names_the_toy_and_credit_is_computed_with_it() -> None:
    rule = parse_recipe(RECIPE, "r.toml").credit
    found = credited([episode("a", 1.0), episode("b", 0.25), episode("c", 0.0)], **dict(rule))
    assert [line.advantage for line in found.values()] == [0.0, -0.75, -1.0]
    assert {line.reason for line in found.values()} == {None}


@pytest.mark.usefixtures("_toy")
def test_its_traits_are_checked_as_those_of_the_others() -> None:
    with pytest.raises(RecipeError, match=r"credit\.baseline = 'best'.* or \"none\""):
        parse_recipe(f"[claim]\ngroup_size = 1\n{RECIPE}", "r.toml")
    with pytest.raises(RecipeError, match='learner "ppo" has its critic as the baseline'):
        parse_recipe(f'learner = "ppo"\n{RECIPE}', "r.toml")


@pytest.mark.usefixtures("_toy")
def test_the_reference_lists_it() -> None:
    schema = CreditOptions.model_json_schema()
    assert "best" in schema["properties"]["baseline"]["enum"]
