"""A file of tasks, what a run is given, and the judge that compares its output with the answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.rollout.agents import run_environment, run_url
from pawl.rollout.judges import score_answer
from pawl.rollout.tasks import RolloutError, parse_tasks, tasks_digest
from proxy.routing import find_route

FIELDS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: name != "id"),
    st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8")) | st.none(),
    min_size=1,
)


def lines(*tasks: Any) -> bytes:
    return "".join(json.dumps(task) + "\n" for task in tasks).encode()


@given(st.lists(FIELDS, min_size=1, unique_by=lambda fields: json.dumps(fields, sort_keys=True)))
def test_tasks_are_read_in_file_order_with_all_their_fields(tasks: list[dict[str, Any]]) -> None:
    found = parse_tasks(lines(*tasks), "tasks.jsonl")
    assert [task.fields for task in found] == tasks
    assert len({task.name for task in found}) == len(tasks)


@given(FIELDS)
def test_name_of_a_task_depends_on_its_content_alone(fields: dict[str, Any]) -> None:
    turned = dict(reversed(fields.items()))
    [one] = parse_tasks(lines(fields), "a.jsonl")
    [other] = parse_tasks(b"\n\n" + lines(turned), "b.jsonl")
    assert one.name == other.name
    assert tasks_digest((one,)) == tasks_digest((other,))


def test_id_field_of_a_task_is_its_name() -> None:
    tasks = parse_tasks(lines({"id": "t1"}, {"id": 2}), "tasks.jsonl")
    assert [task.name for task in tasks] == ["t1", "2"]


def test_byte_order_mark_of_a_task_file_is_ignored() -> None:
    told = lines({"id": "t1"}, {"q": 2})
    assert parse_tasks(b"\xef\xbb\xbf" + told, "a.jsonl") == parse_tasks(told, "a.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "tasks.jsonl has no tasks"),
        (b'{"id": "a"}\n{"id":', r"line 2 is no task .*must be a JSON object"),
        (b'["a"]\n', "line 1 is no task"),
        (b'{"id": "a"}\n\n{"id": "a"}\n', r"line 3: the task 'a' is already in line 1"),
        (b'{"q": 1}\n{"q": 1}\n', r"line 2: the task .* use -n"),
        (b'{"id": true}', "`id` must be a text or a whole number"),
        (b'{"id": " "}', "`id` must be a text"),
        (b'{"id": "."}', "must not be '.'"),
        (b'{"id": ".."}', "must not be '..'"),
        (b'{"id": "a\\nb"}', "at most 256 printable"),
        (json.dumps({"id": "x" * 257}).encode(), "at most 256 printable"),
    ],
)
def test_line_of_a_task_file_that_is_no_task_is_refused_by_its_number(
    text: bytes, message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        parse_tasks(text, "tasks.jsonl")


NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("output", "expected", "right"),
    [
        ("42", 42, True),
        ("thinking…\n 42.0 \n\n", "42", True),
        ("1,081.", 1081, True),
        ("41.9", 42, False),
        ("42\nor so", 42, False),
        ("Paris.", "paris", True),
        ("  New   York", "new york", True),
        ("", "paris", False),
        ("b", ["a", "b"], True),
        ("c", ["a", "b"], False),
        ("true", True, True),
        ("1", True, False),
        ('{"a": 1}', {"a": 1}, True),
        ("nan", "NaN", True),
        ("", [], False),
    ],
)
def test_last_line_of_the_output_is_compared_with_the_tasks_answer(
    output: str, expected: Any, right: bool
) -> None:
    assert score_answer(output, expected) == float(right)


@given(st.text(), st.text() | NUMBERS | st.none() | st.booleans())
def test_any_output_can_be_compared_with_any_answer(output: str, expected: Any) -> None:
    assert score_answer(output, expected) in (0.0, 1.0)


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1))
def test_output_that_ends_with_the_answers_text_is_right(text: str) -> None:
    assert score_answer(f"so:\n{text}\n", text) == 1.0


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1)


@given(NAMES, NAMES, st.sampled_from([None, "train", "eval"]))
def test_proxy_reads_task_episode_and_split_from_a_runs_base_url(
    task: str, episode: str, split: str | None
) -> None:
    url = run_url("http://h:1", task=task, episode=episode, split=split)  # type: ignore[arg-type]
    route = find_route("POST", url.removeprefix("http://h:1") + "/v1/chat/completions")
    assert (route.task, route.episode, route.split) == (task, episode, split)


def variables(
    given: dict[str, str], task: bytes = b"{}", model: str | None = None
) -> dict[str, str]:
    names = {"TASK_ID": "t1"}
    return run_environment("http://h/task/t1", model=model, given=given, names=names, task=task)


def test_openais_and_anthropics_sdks_get_the_base_url_of_the_run() -> None:
    assert variables({}) == {
        "OPENAI_BASE_URL": "http://h/task/t1/v1",
        "ANTHROPIC_BASE_URL": "http://h/task/t1",
        "OPENAI_API_KEY": "unused",
        "ANTHROPIC_API_KEY": "unused",
        "ROLLOUT_TASK_ID": "t1",
        "ROLLOUT_TASK": "{}",
    }
    named = variables({}, model="m@3")
    assert named["OPENAI_MODEL"] == named["ANTHROPIC_MODEL"] == "m@3"


def test_api_keys_in_the_users_environment_are_not_replaced() -> None:
    kept = variables({"OPENAI_API_KEY": "sk", "ANTHROPIC_AUTH_TOKEN": "t"})
    assert not {"OPENAI_API_KEY", "ANTHROPIC_API_KEY"} & kept.keys()


def test_task_too_long_for_an_environment_variable_is_left_out_of_the_environment() -> None:
    assert "ROLLOUT_TASK" not in variables({}, task=b"x" * 200_000)
