"""The example of a judge: what it says of an exported episode."""

import json
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest

from pawl.judging.answers import read_answer
from tests.conftest import ROOT

EXAMPLE = ROOT / "examples" / "arithmetic_judge" / "arithmetic_judge.py"


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
def test_it_knows_right_from_wrong_and_what_it_cannot_tell(
    question: str, answer: str | None, value: float | None
) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        input=json.dumps(line(question, answer)).encode() + b"\n",
        capture_output=True,
        check=True,
        timeout=timedelta(seconds=30).total_seconds(),
    )
    said = read_answer(done.stdout, "e")
    assert said == ([] if value is None else [{"value": value, "episode": "e"}])
