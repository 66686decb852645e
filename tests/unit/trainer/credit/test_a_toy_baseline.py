"""A baseline is one file: put beside the others, recipes may name it, and nothing else changes."""

import sys
from collections.abc import Iterator

import pytest

import trainer.credit.baselines
from tests.conftest import ROOT
from tests.support.docs.documents import split_blocks
from tests.support.lines import credited, episode
from trainer.credit.baselines.registry import baseline_names, baselines
from trainer.errors import RecipeError
from trainer.recipes.credit import CreditOptions
from trainer.recipes.recipe import parse_recipe

FOLDER = ROOT / "tests/support/toy_baselines"
RECIPE = '[credit]\nbaseline = "best"\nnormalisation = "none"'


@pytest.fixture
def _toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of baselines with the toy's file in it."""
    folders = [*trainer.credit.baselines.__path__, str(FOLDER)]
    monkeypatch.setattr(trainer.credit.baselines, "__path__", folders)
    baselines.cache_clear()
    yield
    monkeypatch.undo()
    baselines.cache_clear()
    sys.modules.pop("trainer.credit.baselines.best", None)


def test_it_is_the_code_of_the_guide() -> None:
    page = ROOT / "docs/howto/add-a-baseline.md"
    [code] = [one for one in split_blocks(page, page.read_text())[1] if one.language == "python"]
    assert (FOLDER / "best.py").read_text().endswith(f"\n\n{code.text}")


def test_the_baselines_that_come_with_pawl() -> None:
    assert baseline_names() == ("group", "leave_one_out", "moving", "none")


def test_a_name_that_no_file_has_is_refused_with_those_that_there_are() -> None:
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
    properties = CreditOptions.model_json_schema()["properties"]
    assert properties["baseline"]["enum"][:2] == ["best", "group"]
