"""The example's judge: what it says of an attempt, and how it says it."""

from __future__ import annotations

import json
import os
import urllib.error
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from tests.unit.examples.test_calculator_example import judge


def test_a_verdict_on_a_run_is_about_the_run_and_its_tool_call() -> None:
    tool = {"id": "c1", "name": "calculator", "status": "ok"}
    named = {"id": "c1", "name": "calculator"}
    result = {"id": "q", "response_id": "r1", "answer": "84", "tool": tool}
    told = {"task": {"id": "q", "answer": 84}, "output": json.dumps(result), "episode": "e"}
    assert judge.verdict(told) == [
        {"metric": "reward", "value": judge.RIGHT},
        {"metric": "success", "value": 1},
        {"metric": "tool_status", "value": "ok", "response": "r1", **named},
    ]


def result(answer: str | None, status: str | None, **more: Any) -> dict[str, Any]:
    tool = {"id": "c1", "name": "calculator", "status": status} if status else None
    return {"id": "q", "response_id": "r", "answer": answer, "tool": tool, "error": None} | more


@pytest.mark.parametrize(
    ("answer", "status", "right", "reward"),
    [
        ("84", "ok", True, judge.RIGHT),
        ("84.0", "ok", True, judge.RIGHT),
        ("85", "ok", False, judge.WRONG_CALL),
        ("84", "malformed", False, judge.NOTHING),
        ("", "error", False, judge.NOTHING),
        ("84.", None, True, judge.RIGHT),
        ("12 * 7 is 84", None, False, judge.NOTHING),
        ("nan", None, False, judge.NOTHING),
        (None, None, False, judge.NOTHING),
    ],
)
def test_scores(answer: str | None, status: str | None, right: bool, reward: float) -> None:
    assert judge.judge(result(answer, status), 84.0) == judge.Verdict(right, reward, status)


def test_feedback_names_the_response_and_the_tool_call() -> None:
    judged = result("84", "ok")
    items = judge.feedback(judged, judge.judge(judged, 84.0))
    assert {"metric": "reward", "value": judge.RIGHT, "response": "r"} in items
    assert {"metric": "success", "value": 1, "response": "r"} in items
    assert items[-1] == {
        "metric": "tool_status",
        "value": "ok",
        "response": "r",
        "id": "c1",
        "name": "calculator",
    }
    untried = result("84", None)
    metrics = [item["metric"] for item in judge.feedback(untried, judge.judge(untried, 84.0))]
    assert metrics == ["reward", "success"]


def refusal(code: int) -> urllib.error.HTTPError:
    error = urllib.error.HTTPError("http://f", code, "no", Message(), None)
    error.read = lambda *_: b"why"  # type: ignore[method-assign]
    return error


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(judge, "LONGEST_PAUSE", 0.001)


class Clock:
    """A clock that only sleeping moves, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.usefixtures("quick")
def test_delivery_tries_the_same_bytes_again() -> None:
    sent: list[bytes] = []

    def send(body: bytes) -> None:
        sent.append(body)
        if len(sent) < 4:
            raise [ConnectionRefusedError(), refusal(503), refusal(429)][len(sent) - 1]

    judge.deliver(send, [{"metric": "reward"}], patience=5.0)
    assert len(sent) == 4
    assert len(set(sent)) == 1


@pytest.mark.usefixtures("quick")
def test_a_refusal_is_not_tried_again_and_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    clock = Clock()
    monkeypatch.setattr(judge, "time", clock)

    def send(code: int) -> None:
        tried.append(code)
        raise refusal(code)

    with pytest.raises(judge.Undelivered, match="422"):
        judge.deliver(lambda _: send(422), [{}], patience=5.0)
    assert tried == [422]
    with pytest.raises(judge.Undelivered, match="500"):
        judge.deliver(lambda _: send(500), [{}], patience=0.02)
    assert tried.count(500) > 3
    assert clock.now <= 0.02


def test_a_growing_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "results"
    path.write_bytes(b"one\ntw")
    source = os.open(path, os.O_RDONLY)
    stopped: list[bool] = []
    reading = judge.chunks(source, True, lambda: bool(stopped))
    assert next(reading) == [b"one"]
    with path.open("ab") as more:
        more.write(b"o\nthree")
    assert next(reading) == [b"two"]
    stopped.append(True)
    assert next(reading) == [b"three"]
    assert next(reading, None) is None
    os.close(source)


def test_the_summary_counts_what_was_judged() -> None:
    tally = judge.Tally()
    tally.verdicts["a"] = [judge.Verdict(True, 1.0, "ok"), judge.Verdict(False, 0.0, None)]
    tally.verdicts["b"] = [judge.Verdict(False, 0.0, "malformed")] * 2
    summary = tally.summary()
    assert (summary["success"], summary["well_formed"], summary["spread"]) == (0.25, 0.25, 0.5)
    assert judge.Tally().summary()["success"] is None
