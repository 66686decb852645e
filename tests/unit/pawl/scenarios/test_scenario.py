"""A scenario's file: what it says, what it leaves out, and what is wrong with it."""

import sys
from pathlib import Path

import pytest

from pawl.scenarios.run import Run, RunOptions
from pawl.scenarios.scenario import (
    EXAMPLES,
    ScenarioFailed,
    chat_template,
    find_scenario,
    held,
    interpreter,
    parse_scenario,
    policies_of,
    recipe_file,
)
from trainer.recipes.recipe import load_recipe

LEAST = 'title = "A title"\nabout = "What it is."\nmodel = "m"\n'
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/example.toml"))


def test_what_a_file_leaves_out_has_defaults() -> None:
    scenario = parse_scenario(LEAST, Path("/somewhere/sums"))
    assert (scenario.name, scenario.folder) == ("sums", Path("/somewhere/sums"))
    assert (scenario.agent, scenario.judge, scenario.tasks) == (
        "agent:answer",
        "judge:verdict",
        ("tasks.py",),
    )
    assert scenario.asks_for == "m"
    assert scenario.score == "reward"


def test_agents_of_several_policies_know_whom_they_ask_for() -> None:
    assert parse_scenario(LEAST + 'policies = "policies.toml"', Path("x")).asks_for == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("title =", "sums/example.toml is not TOML"),
        (LEAST + 'modle = "x"', "unknown key 'modle': did you mean model?"),
        ('title = "A"\nmodel = "m"', "about: Field required"),
        (LEAST + "held_out = 0", "held_out: Input should be greater than or equal to 1"),
        (LEAST + 'agent = "agent"', "agent: String should match"),
        (LEAST + 'score = "f1"', "score: Input should be 'reward' or 'success'"),
    ],
)
def test_what_is_wrong_is_said_with_its_key(text: str, said: str) -> None:
    with pytest.raises(ScenarioFailed, match=r"sums/example\.toml") as raised:
        parse_scenario(text, Path("sums"))
    assert said in str(raised.value)


def test_an_unknown_name_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(ScenarioFailed, match="there is no example 'nope': name one of"):
        find_scenario("nope")


def test_a_folder_is_used_by_one_run_at_a_time(tmp_path: Path) -> None:
    """The last one may be ending yet, and its database write into the folder."""
    var = tmp_path / "var" / "sums"
    with held(var), pytest.raises(ScenarioFailed, match=f"another run uses {var}"), held(var):
        pass
    with held(var):
        assert var.is_dir()


async def test_a_run_whose_folder_is_in_use_starts_nothing(tmp_path: Path) -> None:
    var = tmp_path / "calculator"
    options = RunOptions(
        name="calculator", minutes=1.0, seed=0, var=var, models=tmp_path / "models"
    )
    with held(var), pytest.raises(ScenarioFailed, match=f"another run uses {var}"):
        await Run(options).run()
    assert not (var / "data").exists()


def test_without_a_checkout_there_are_no_examples(tmp_path: Path) -> None:
    with pytest.raises(ScenarioFailed, match="run this from a checkout"):
        find_scenario("math", tmp_path)


def test_a_missing_framework_has_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pawl.scenarios.scenario.CLIENTS", tmp_path / "python")
    assert interpreter(find_scenario("calculator")) == sys.executable
    with pytest.raises(ScenarioFailed, match="install it with `make example NAME=math`"):
        interpreter(find_scenario("math"))


def test_a_template_that_is_not_there_is_said_so() -> None:
    scenario = find_scenario("math").model_copy(update={"chat_template": "nope"})
    with pytest.raises(ScenarioFailed, match="chat_template: there is no 'nope'"):
        chat_template(scenario)


@pytest.mark.parametrize("name", NAMES)
def test_each_example_is_whole(name: str) -> None:
    scenario = find_scenario(name)
    template = chat_template(scenario)
    assert template is None or template.is_file()
    recipe = load_recipe(recipe_file(scenario, None))
    specs = policies_of(scenario)
    assert any(spec.trained for spec in specs)
    assert {spec.base for spec in specs} == {scenario.model}
    assert recipe.claim.group_size > 1
    assert all((scenario.folder / file).is_file() for file in (scenario.tasks[0], "README.md"))
