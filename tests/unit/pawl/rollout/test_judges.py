"""The judge that compares an output with the task's answer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.rollout.judges import compare

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
