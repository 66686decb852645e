"""A file of tasks: its lines and names; and the judge that compares an output with the answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.rollout.judges import compare
from pawl.rollout.tasks import RolloutError, digest, parse_tasks

FIELDS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: name != "id"),
    st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8")) | st.none(),
    min_size=1,
)


def lines(*tasks: Any) -> bytes:
    return "".join(json.dumps(task) + "\n" for task in tasks).encode()


@given(st.lists(FIELDS, min_size=1, unique_by=lambda fields: json.dumps(fields, sort_keys=True)))
def test_tasks_come_in_order_with_all_their_fields(tasks: list[dict[str, Any]]) -> None:
    found = parse_tasks(lines(*tasks), "tasks.jsonl")
    assert [task.fields for task in found] == tasks
    assert len({task.name for task in found}) == len(tasks)


@given(FIELDS)
def test_a_name_depends_on_what_the_task_says_and_on_nothing_else(fields: dict[str, Any]) -> None:
    turned = dict(reversed(fields.items()))
    [one] = parse_tasks(lines(fields), "a.jsonl")
    [other] = parse_tasks(b"\n\n" + lines(turned), "b.jsonl")
    assert one.name == other.name
    assert digest((one,)) == digest((other,))


def test_an_id_is_the_name() -> None:
    tasks = parse_tasks(lines({"id": "t1"}, {"id": 2}), "tasks.jsonl")
    assert [task.name for task in tasks] == ["t1", "2"]


def test_an_unseen_mark_before_the_first_line_is_no_part_of_it() -> None:
    told = lines({"id": "t1"}, {"q": 2})
    assert parse_tasks(b"\xef\xbb\xbf" + told, "a.jsonl") == parse_tasks(told, "a.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "tasks.jsonl has no tasks"),
        (b'{"id": "a"}\n{"id":', r"line 2 is no task .*must be a JSON object"),
        (b'["a"]\n', "line 1 is no task"),
        (b'{"id": "a"}\n\n{"id": "a"}\n', r"line 3: the task 'a' stands in line 1 already"),
        (b'{"q": 1}\n{"q": 1}\n', r"line 2: the task .* use -n"),
        (b'{"id": true}', "`id` must be a text or a whole number"),
        (b'{"id": " "}', "`id` must be a text"),
        (b'{"id": "."}', "must not be '.'"),
        (b'{"id": ".."}', "must not be '..'"),
        (b'{"id": "a\\nb"}', "at most 256 printable"),
        (json.dumps({"id": "x" * 257}).encode(), "at most 256 printable"),
    ],
)
def test_line_that_is_no_task_is_refused_by_its_number(text: bytes, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        parse_tasks(text, "tasks.jsonl")


def test_missing_field_is_refused_by_the_option_that_names_it() -> None:
    with pytest.raises(RolloutError, match=r"line 2: .* no field 'answer', which --answer names"):
        parse_tasks(lines({"answer": None}, {"q": 1}), "tasks.jsonl", "answer")
    with pytest.raises(RolloutError, match=r"--hide: no task of tasks.jsonl has a field 'b'"):
        parse_tasks(lines({"a": 1}, {"q": 1}), "tasks.jsonl", hidden=("a", "b"))


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
def test_last_line_is_compared_with_the_answer(output: str, expected: Any, right: bool) -> None:
    assert compare(output, expected) == float(right)


@given(st.text(), st.text() | NUMBERS | st.none() | st.booleans())
def test_any_output_can_be_compared(output: str, expected: Any) -> None:
    assert compare(output, expected) in (0.0, 1.0)


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1))
def test_text_is_its_own_answer(text: str) -> None:
    assert compare(f"so:\n{text}\n", text) == 1.0
