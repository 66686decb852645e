"""A scenario's file, what is wrong with it, and what `pawl example` needs besides."""

import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from benchmarks.stack import free_port
from pawl.commands.local import example
from pawl.scenarios.progress import Progress
from pawl.scenarios.run import Run, RunOptions
from pawl.scenarios.scenario import (
    EXAMPLES,
    ScenarioFailed,
    chat_template,
    find_scenario,
    lock_folder,
    make_tasks,
    parse_scenario,
    policies_of,
    recipe_file,
)
from tests.support.waiting import until
from trainer.recipes.recipe import load_recipe

LEAST = 'title = "A title"\nmodel = "m"\n'
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/example.toml"))


def test_keys_missing_from_a_scenario_file_have_defaults() -> None:
    scenario = parse_scenario(LEAST, Path("/somewhere/sums"))
    assert (scenario.name, scenario.folder) == ("sums", Path("/somewhere/sums"))
    assert (scenario.agent, scenario.judge, scenario.tasks) == (
        "agent:answer",
        "judge:verdict",
        ("tasks.py",),
    )
    assert scenario.requested_model == "m"
    assert scenario.score == "reward"


def test_scenario_of_several_policies_names_no_policy_to_its_agents() -> None:
    assert parse_scenario(LEAST + 'policies = "policies.toml"', Path("x")).requested_model == ""


def test_missing_required_key_of_a_scenario_file_is_named() -> None:
    with pytest.raises(ScenarioFailed, match=r"sums/example\.toml: model: Field required"):
        parse_scenario('title = "A"', Path("sums"))


async def test_folder_in_use_is_refused_to_another_run(tmp_path: Path) -> None:
    """The last run may be ending yet, and its database write into the folder."""
    var = tmp_path / "var" / "calculator"
    options = RunOptions(
        name="calculator", minutes=1.0, seed=0, var=var, models=tmp_path / "models"
    )
    with lock_folder(var), pytest.raises(ScenarioFailed, match=f"another run uses {var}"):
        await Run(options).run()
    assert not (var / "data").exists()
    with lock_folder(var):
        assert var.is_dir()


async def test_time_limit_starts_once_the_stack_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[float] = []

    def render(progress: Progress) -> str:
        shown.append(progress.seconds)
        return ""

    @asynccontextmanager
    async def slow_stack(*_: Any) -> AsyncIterator[None]:
        await until(lambda: len(shown) > 1)
        raise ScenarioFailed("the model server ended")
        yield

    monkeypatch.setattr("pawl.scenarios.run.render", render)
    monkeypatch.setattr("pawl.scenarios.run.running_stack", slow_stack)
    monkeypatch.setattr("pawl.scenarios.run.preflight", lambda _: None)
    monkeypatch.setattr("pawl.scenarios.run.unpacked_unless_stopped", AsyncMock(return_value="m"))
    options = RunOptions(
        name="calculator", minutes=1.0, seed=0, var=tmp_path / "var", models=tmp_path / "models"
    )
    run = Run(options)
    with pytest.raises(ScenarioFailed, match="the model server ended"):
        await run.run()
    assert set(shown) == {0.0}


def test_example_outside_a_checkout_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ScenarioFailed, match="run this from a checkout"):
        find_scenario("math", tmp_path)


async def test_program_that_makes_tasks_for_too_long_is_reported_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pawl.scenarios.scenario.TASKS_S", 0.2)
    (tmp_path / "tasks.py").write_text("import time; time.sleep(60)")
    scenario = find_scenario("math").model_copy(update={"folder": tmp_path, "tasks": ["tasks.py"]})
    with pytest.raises(ScenarioFailed, match=r"it took over 0\.2 s"):
        await make_tasks(scenario, 1, 0, "train", tmp_path)


async def test_too_few_tasks_are_accepted_only_if_held_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "tasks.py").write_text("""print('{"id": "t", "answer": 1}')""")
    scenario = find_scenario("math").model_copy(update={"folder": tmp_path, "tasks": ["tasks.py"]})
    assert len(await make_tasks(scenario, 2, 0, "held-out", tmp_path)) == 1
    with pytest.raises(ScenarioFailed, match=r"tasks\.py made only 1 of 2 tasks"):
        await make_tasks(scenario, 2, 0, "train", tmp_path)
    (tmp_path / "tasks.py").write_text("print('no task')")
    with pytest.raises(ScenarioFailed, match=r"tasks\.py"):
        await make_tasks(scenario, 2, 0, "train", tmp_path)


def test_missing_chat_template_of_a_scenario_is_named() -> None:
    scenario = find_scenario("math").model_copy(update={"chat_template": "nope"})
    with pytest.raises(ScenarioFailed, match="chat_template: there is no 'nope'"):
        chat_template(scenario)


@pytest.mark.parametrize("name", NAMES)
def test_each_example_has_all_files_and_a_policy_to_train(name: str) -> None:
    scenario = find_scenario(name)
    template = chat_template(scenario)
    assert template is None or template.is_file()
    recipe = load_recipe(recipe_file(scenario, None))
    specs = policies_of(scenario)
    assert any(spec.trained for spec in specs)
    assert {spec.base for spec in specs} == {scenario.model}
    assert recipe.claim.group_size > 1
    assert all((scenario.folder / file).is_file() for file in (scenario.tasks[0], "README.md"))


Said = Callable[[str | None], str]


@pytest.fixture
def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Said:
    """The line by which `pawl example NAME` refuses; nothing is unpacked or started."""
    monkeypatch.setattr("pawl.commands.local.check_torch", lambda: None)
    unpacked = AsyncMock(side_effect=lambda folder: folder)
    monkeypatch.setattr("pawl.scenarios.run.unpacked_unless_stopped", unpacked)
    monkeypatch.setattr("pawl.stack.stack.check_memory", lambda: None)
    monkeypatch.chdir(tmp_path)

    def run(name: str | None) -> str:
        with pytest.raises(SystemExit) as ended:
            example(name)
        assert ended.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    return run


def test_missing_or_unknown_example_name_is_refused(said: Said) -> None:
    assert said(None) == "pawl: name an example, as in `make example NAME=math`"
    assert "there is no example 'nope': name one of bfcl, calculator, math" in said("nope")


def test_missing_agent_framework_is_reported_with_the_remedy(
    said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pawl.scenarios.scenario.CLIENTS", tmp_path / "python")
    assert "install it with `make example NAME=math`" in said("math")


def test_missing_library_for_the_picture_is_named(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib, which draws the picture" in said("calculator")


def test_taken_port_of_a_scenario_is_named_with_its_setting(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PAWL_LISTEN", "PAWL_ADMIN_LISTEN", "PAWL_TRAINER_LISTEN"):
        monkeypatch.setenv(name, f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("PAWL_VLLM_PORT", str(free_port()))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        monkeypatch.setenv("PAWL_CONTROLLER_LISTEN", f"127.0.0.1:{port}")
        assert f"port {port} of PAWL_CONTROLLER_LISTEN is taken" in said("calculator")
