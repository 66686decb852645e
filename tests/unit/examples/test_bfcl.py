"""The example of a public leaderboard: tasks, its own checkers as the reward, and an agent."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import jsonschema
import pytest
from openai.types.chat import ChatCompletionMessage

from pawl.scenarios.scenario import EXAMPLES, ScenarioFailed, check_model, find_scenario

FOLDER = EXAMPLES / "bfcl"
WANT_A_CALL = (
    *("simple_python", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Import the example's files, and forget them again."""
    names = ("leaderboard", "tasks", "agent", "judge")
    monkeypatch.syspath_prepend(FOLDER)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: __import__(name) for name in names})
    for name in names:
        sys.modules.pop(name, None)


def tasks_of(tasks: ModuleType, count: int, split: str, *categories: str) -> list[dict[str, Any]]:
    return list(tasks.tasks(count, 0, split, list(categories)))


def rewarded(judge: ModuleType, task: dict[str, Any], calls: Sequence[dict[str, Any]]) -> float:
    output = json.dumps({"calls": list(calls), "well_formed": True})
    told = {"task": task, "output": output, "episode": "e"}
    return float(judge.verdict(told)["reward"])


def right_calls(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Return calls with a right value for each argument that has one."""
    return [
        {
            name.replace(".", "_"): {
                key: filled(values[0]) for key, values in arguments.items() if values[0] != ""
            }
            for name, arguments in call.items()
        }
        for call in task["answer"]
    ]


def filled(value: Any) -> Any:
    """Of an object each key has the values that are right; lists of objects likewise."""
    if isinstance(value, dict):
        return {key: filled(values[0]) for key, values in value.items() if values[0] != ""}
    return [filled(one) for one in value] if isinstance(value, list) else value


def test_no_bfcl_entry_is_in_both_training_and_held_out_tasks(files: SimpleNamespace) -> None:
    kinds = ("simple_python", "parallel", "irrelevance")
    train = tasks_of(files.tasks, 900, "train", *kinds)
    held_out = tasks_of(files.tasks, 900, "held-out", *kinds)
    assert not {one["entry"] for one in train} & {one["entry"] for one in held_out}
    assert len({one["entry"] for one in (*train, *held_out)}) == 400 + 200 + 240
    # Training tasks come again under names of their own, held-out ones do not.
    assert len({one["id"] for one in train}) == 900
    assert len(held_out) == len({one["entry"] for one in held_out})
    assert {one["temperature"] for one in held_out} == {0.0}
    assert {one["temperature"] for one in train} == {1.0}
    assert tasks_of(files.tasks, 900, "train", *kinds) == train


def test_categories_have_equal_numbers_of_tasks(files: SimpleNamespace) -> None:
    some = tasks_of(
        files.tasks, 40, "train", "simple_python", "live_multiple", "irrelevance", "multiple"
    )
    counts = [
        sum(one["category"] == name for one in some) for name in {one["category"] for one in some}
    ]
    assert counts == [10] * 4
    assert {one["id"].partition("/")[0] for one in some} == {one["category"] for one in some}


@pytest.mark.parametrize("category", WANT_A_CALL)
def test_right_calls_earn_the_reward_and_missing_or_extra_calls_do_not(
    files: SimpleNamespace, category: str
) -> None:
    tasks = tasks_of(files.tasks, 40, "held-out", category)
    assert tasks
    for task in tasks:
        calls = right_calls(task)
        assert rewarded(files.judge, task, calls) == 1.0, task["id"]
        assert rewarded(files.judge, task, []) == 0.0
        assert rewarded(files.judge, task, [*calls, calls[0]]) == 0.0


@pytest.mark.parametrize("category", ["irrelevance", "live_irrelevance"])
def test_irrelevance_task_rewards_only_making_no_call(
    files: SimpleNamespace, category: str
) -> None:
    [task] = tasks_of(files.tasks, 1, "train", category)
    assert rewarded(files.judge, task, []) == 1.0
    assert rewarded(files.judge, task, [{"any": {}}]) == 0.0


@pytest.mark.parametrize("arguments", [{}, {"artist": {"a": [1]}}, {"artist": [[["x"]]]}])
def test_bfcl_judge_scores_tool_call_arguments_of_any_shape(
    files: SimpleNamespace, arguments: Any
) -> None:
    for category in WANT_A_CALL:
        for task in tasks_of(files.tasks, 10, "train", category):
            calls = [dict.fromkeys(call, arguments) for call in right_calls(task)]
            assert rewarded(files.judge, task, calls) in (0.0, 1.0)


@pytest.mark.parametrize("category", [*WANT_A_CALL, "irrelevance", "multi_turn_base"])
def test_tool_schemas_and_names_are_valid_for_the_api(
    files: SimpleNamespace, category: str
) -> None:
    for task in tasks_of(files.tasks, 60, "train", category):
        for tool in files.leaderboard.tools(task["function"]):
            jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])
            assert "." not in tool["function"]["name"]


def ask_by(script: Iterator[dict[str, Any]]) -> Callable[..., Any]:
    """Return what asks a model that says what the script says, and notes what it was sent."""

    async def ask(**request: Any) -> Any:
        json.dumps(request)
        message = ChatCompletionMessage(role="assistant", **next(script))
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    return ask


def said(calls: Sequence[str], known: dict[str, list[str]], number: int) -> dict[str, Any]:
    """Return the reply that makes these calls, written as Python, with the arguments by name."""
    made = []
    for place, call in enumerate(calls):
        name, arguments = parsed(call, known)
        function = {"name": name, "arguments": json.dumps(arguments)}
        made.append({"id": f"call_{number}_{place}", "type": "function", "function": function})
    return {"tool_calls": made}


def parsed(call: str, known: dict[str, list[str]]) -> tuple[str, dict[str, Any]]:
    import ast

    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    by_place = dict(zip(known[node.func.id], node.args, strict=False))
    by_name = {one.arg: one.value for one in node.keywords if one.arg is not None}
    values = {key: ast.literal_eval(value) for key, value in (by_place | by_name).items()}
    return node.func.id, values


@pytest.mark.parametrize("category", ["multi_turn_base", "multi_turn_miss_func"])
def test_right_calls_in_each_turn_earn_the_reward(files: SimpleNamespace, category: str) -> None:
    for task in tasks_of(files.tasks, 12, "held-out", category):
        later = [one for some in task["missed_function"].values() for one in some]
        every = [*task["function"], *later]
        known = {one["name"]: list(one["parameters"]["properties"]) for one in every}
        script = []
        for number, calls in enumerate(task["answer"]):
            script += [said(calls, known, number)] if calls else []
            script.append({"content": "Done."})
        turns = asyncio.run(files.agent.run_turns(task, ask_by(iter(script))))
        told = {"task": task, "episode": "e"}
        assert files.judge.verdict({**told, "output": json.dumps({"turns": turns})}) == {
            "reward": 1.0
        }
        nothing = json.dumps({"turns": [[] for _ in turns]})
        assert files.judge.verdict({**told, "output": nothing}) == {"reward": 0.0}
    kept = vars(files.leaderboard.multi_turn_utils)
    assert not [name for name in kept if name.startswith(("run_", "judged_"))]


def test_bfcl_agent_reads_tool_calls_from_reply_text_and_from_tool_call_fields(
    files: SimpleNamespace,
) -> None:
    text = (
        'Here they are:\n```json\n{"name": "a", "arguments": {"x": 1}}\n'
        '{"name": "b", "parameters": {"y": {"name": "c", "arguments": {}}}}\n```\n{"name": 3} {'
    )
    message = ChatCompletionMessage(role="assistant", content=text)
    assert files.agent.calls_of(message) == [
        (None, "a", {"x": 1}),
        (None, "b", {"y": {"name": "c", "arguments": {}}}),
    ]
    listed = '[{"name": "a", "arguments": {}}, {"name": "a", "arguments": {}}]'
    message = ChatCompletionMessage(role="assistant", content=listed)
    assert len(files.agent.calls_of(message)) == 2
    function = {"name": "a", "arguments": '{"x": 1'}
    called = {"id": "1", "type": "function", "function": function}
    message = ChatCompletionMessage(role="assistant", content=None, tool_calls=[called])
    assert files.agent.calls_of(message) == [("1", "a", {})]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("__import__", {"name": "os"}),
        ("cd", {"folder=__import__('os').getcwd(), x": "a"}),
        ("cd.__class__", {}),
    ],
)
def test_bfcl_agent_replaces_calls_of_unknown_functions_and_escapes_arguments(
    files: SimpleNamespace, name: str, arguments: dict[str, Any]
) -> None:
    """The leaderboard runs what it is given as Python."""
    assert files.agent.python_call(name, arguments, {"cd"}) == "unknown_function()"
    value = "a'); __import__('os').getcwd(); ('"
    assert parsed(files.agent.python_call("cd", {"folder": value}, {"cd"}), {"cd": []}) == (
        "cd",
        {"folder": value},
    )


@pytest.mark.parametrize(
    ("gib", "fit"), [(24, "0.5B-Instruct, Qwen/Qwen2.5-Coder-1.5B"), (4, "none")]
)
def test_missing_model_option_is_refused_naming_the_models_that_fit_into_memory(
    monkeypatch: pytest.MonkeyPatch, gib: int, fit: str
) -> None:
    pytest.importorskip("torch")
    memory = "trainer.learners.kernels.process.total_memory"
    monkeypatch.setattr(memory, lambda _: gib * 2**30)
    with pytest.raises(ScenarioFailed, match=f"with --model.* {gib} GiB .*{fit}"):
        check_model(find_scenario("bfcl"), None)
    check_model(find_scenario("bfcl"), "some/folder")
    check_model(find_scenario("math"), None)
