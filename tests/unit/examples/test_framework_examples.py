"""The examples: tasks that share nothing, judges, and agents without a word of Pawl."""

import importlib.util
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pawl.judging.answers import read_answer
from pawl.scenarios.scenario import EXAMPLES, find_scenario
from trainer.recipes.recipe import load_recipe

NAMES = sorted(
    path.parent.name
    for path in EXAMPLES.glob("*/example.toml")
    if find_scenario(path.parent.name).python == "clients"
)
Load = Callable[[str, str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Load a file of an example, with what lies beside it; then forget all of it."""
    before = set(sys.modules)

    def from_file(name: str, module: str) -> ModuleType:
        folder = EXAMPLES / name
        monkeypatch.syspath_prepend(folder)
        spec = importlib.util.spec_from_file_location(f"{name}_{module}", folder / f"{module}.py")
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded

    yield from_file
    for module in set(sys.modules) - before:
        if Path(getattr(sys.modules[module], "__file__", None) or "/").is_relative_to(EXAMPLES):
            del sys.modules[module]


def judged(load: Load, name: str, output: str, **task: Any) -> Any:
    return load(name, "judge").verdict({"task": task, "output": output, "episode": "e"})


@pytest.mark.parametrize(
    "pattern", [*(f"{name}/*.py" for name in (*NAMES, "bfcl")), "calculator/[ac]*.py"]
)
def test_files_of_an_agent_do_not_name_pawl(pattern: str) -> None:
    files = list(EXAMPLES.glob(pattern))
    assert files
    assert not [file for file in files if "pawl" in file.read_text().lower()]


@pytest.mark.parametrize("name", NAMES)
def test_no_task_is_in_both_training_and_held_out_tasks(load: Load, name: str) -> None:
    tasks = load(name, "tasks").tasks
    for seed in range(3):
        train, held_out = tasks(320, seed, "train"), tasks(96, seed, "held-out")
        questions = {task["question"] for task in held_out}
        assert not questions & {task["question"] for task in train}
        assert len({task["id"] for task in (*train, *held_out)}) == 320 + 96
        assert tasks(320, seed, "train") == train
    assert tasks(8, 0, "train") != tasks(8, 1, "train")


def test_no_held_out_question_is_a_worked_example(load: Load) -> None:
    """Its answer would stand in the prompt."""
    shown = {sql for _, sql, _ in load("sql", "shown").POOL}
    tasks = load("sql", "tasks").tasks
    for seed in range(8):
        assert not shown & {task["answer"] for task in tasks(96, seed, "held-out")}


@pytest.mark.parametrize("name", NAMES)
def test_the_right_answer_earns_the_full_reward(load: Load, name: str) -> None:
    tag = "<answer>{}</answer>" if name == "rag" else "{}"
    verdict = load(name, "judge").verdict
    for task in load(name, "tasks").tasks(64, 5, "held-out"):
        output = tag.format(task["answer"])
        assert verdict({"task": task, "output": output, "episode": "e"})["reward"] == 1.0


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("The answer is 1,081.", 1.0),
        ("23 * 47 is 1081", 1.0),
        ("1081 is more than 12", 0.0),
        ("The answer is -1081", 0.0),
        ("nothing", 0.0),
        ("", 0.0),
    ],
)
def test_math_judge_takes_the_last_number_of_the_output_as_the_answer(
    load: Load, output: str, reward: float
) -> None:
    assert judged(load, "math", output, answer=1081) == {"reward": reward}


COUNT = "SELECT COUNT(*) FROM employee WHERE age > 30"


@pytest.mark.parametrize(
    ("query", "reward", "well_formed"),
    [
        ("SELECT SUM(age > 30) FROM employee;", 1.0, 1.0),
        ("SELECT COUNT(*) FROM employee", 0.0, 1.0),
        ("SELECT COUNT(*) FROM nowhere", 0.0, 0.0),
        ("not a query", 0.0, 0.0),
        ("", 0.0, 1.0),
        ("DELETE FROM employee", 0.0, 0.0),
        ("SELECT 1; SELECT 2", 0.0, 0.0),
        ("ATTACH DATABASE 'x' AS y", 0.0, 0.0),
        ("SELECT COUNT(*) FROM employee a, employee b, employee c, employee d", 0.0, 0.0),
        ("SELECT '\ud800'", 0.0, 0.0),
    ],
)
def test_sql_query_is_right_if_its_result_equals_the_expected_result(
    load: Load, query: str, reward: float, well_formed: float
) -> None:
    told = judged(load, "sql", query, answer=COUNT)
    assert told == {"reward": reward, "well_formed": well_formed}


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_expected_query_earns_the_reward_in_each_generated_database(load: Load, split: str) -> None:
    verdict, databases = load("sql", "judge").verdict, load("sql", "databases")
    asked = load("sql", "tasks").many_databases(300, 1, split)
    assert len({task["question"] for task in asked}) == 300
    assert {task["id"].partition("/")[0] for task in asked} == {"degree-1", "degree-2", "degree-3"}
    for task in asked:
        told = {"task": task, "episode": "e"}
        assert verdict({**told, "output": task["answer"]})["reward"] == 1.0
        assert verdict({**told, "output": f"{task['answer']} LIMIT 0"})["reward"] == 0.0
        assert len(databases.tables(task["schema"])) == 10


def test_no_database_is_in_both_training_and_held_out_tasks(load: Load) -> None:
    make = load("sql", "tasks").many_databases
    train, held_out = ({task["schema"] for task in make(60, 0, s)} for s in ("train", "held-out"))
    assert (len(train), len(held_out)) == (4, 2)
    assert not train & held_out


def test_example_database_has_the_same_rows_each_time_and_is_read_only(load: Load) -> None:
    databases = load("sql", "databases")
    for schema in databases.SCHEMAS:
        first, second = (databases.database(schema) for _ in range(2))
        for name in databases.tables(schema):
            query = f"SELECT * FROM {name}"
            assert first.execute(query).fetchall() == second.execute(query).fetchall()
            with pytest.raises(sqlite3.DatabaseError):
                first.execute(f"DELETE FROM {name}")


def test_empty_query_result_is_never_right(load: Load) -> None:
    nobody = "SELECT name FROM employee WHERE age > 900"
    assert judged(load, "sql", nobody, answer=nobody)["reward"] == 0.0


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("<answer>Lena Marsh</answer>", 1.0),
        ("<answer>marsh</answer>", 2 / 3),
        ("<answer>no</answer> so <answer>Lena Marsh.</answer>", 1.0),
        ("Lena Marsh", 0.0),
        ("<answer></answer>", 0.0),
    ],
)
def test_rag_judge_compares_the_words_in_the_answer_tag(
    load: Load, output: str, reward: float
) -> None:
    told = judged(load, "rag", output, answer="Lena Marsh")
    assert told["reward"] == pytest.approx(reward)
    assert told["well_formed"] == float("<answer>" in output)


RECIPES = [
    file
    for name in NAMES
    for file in sorted((EXAMPLES / name).glob("*.toml"))
    if file.name not in ("example.toml", "policies.toml")
]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_recipes_for_comparisons_differ_only_in_learner_or_credit(file: Path) -> None:
    own, usual = load_recipe(str(file)), load_recipe(str(file.parent / "recipe.toml"))
    changed = {name for name, value in own if value != getattr(usual, name)}
    assert changed <= {"learner", "credit"}
    assert own.claim.groups * own.claim.group_size == usual.claim.groups * usual.claim.group_size
    if own.learner == usual.learner:
        changed = {name for name, value in own.credit if value != getattr(usual.credit, name)}
        assert changed <= {"air_lambda"}


def line(question: str, answer: str | None) -> dict[str, Any]:
    reply = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
    asked = {"messages": [{"role": "user", "content": question}]}
    return {"episode": "e", "calls": [{"request": asked, "reply": reply if answer else None}]}


@pytest.mark.parametrize(
    ("question", "answer", "value"),
    [
        ("What is 12 * 3?", "It is 36.", 1.0),
        ("What is 12 - 30?", "-18", 1.0),
        ("What is 12 + 3?", "It is 36.", 0.0),
        ("Who are you?", "36", None),
        ("What is 12 * 3?", None, None),
    ],
)
def test_arithmetic_judge_tells_right_from_wrong_or_states_nothing(
    question: str, answer: str | None, value: float | None
) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "arithmetic_judge" / "arithmetic_judge.py")],
        input=json.dumps(line(question, answer)).encode() + b"\n",
        capture_output=True,
        check=True,
        timeout=30,
    )
    said = read_answer(done.stdout, "e")
    assert said == ([] if value is None else [{"value": value, "episode": "e"}])
