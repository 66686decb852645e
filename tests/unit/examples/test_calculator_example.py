"""The calculator example: its prompt, questions, tool, agent and judge."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import sys
import urllib.error
from email.message import Message
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import until

EXAMPLE = Path(__file__).parents[3] / "examples" / "calculator"


def load(name: str) -> ModuleType:
    """An example's file as a module, under a name that can clash with no package."""
    spec = importlib.util.spec_from_file_location(f"calculator_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


# The agent finds its tool beside it, as it does when it is run.
sys.path.insert(0, str(EXAMPLE))
import attempts  # noqa: E402
import calculator  # noqa: E402

agent = load("agent")
judge = load("judge")
questions = load("questions")


# --- the prompt ---------------------------------------------------------------------------------


def test_worked_examples_of_the_prompt_have_the_calculators_results() -> None:
    for _, expression, result in agent.EXAMPLES:
        assert calculator.calculator(expression) == result


def test_worked_examples_pair_each_call_with_its_result() -> None:
    messages = agent.messages_for("What is 1 + 1?", len(agent.EXAMPLES))
    called = [call["id"] for m in messages for call in m.get("tool_calls", [])]
    answered = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
    assert called == answered
    assert len(set(called)) == len(agent.EXAMPLES)
    assert messages[-1] == {"role": "user", "content": "What is 1 + 1?"}


# --- questions ----------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(0, 2**32), st.integers(1, 60))
def test_splits_share_no_question(seed: int, other: int, count: int) -> None:
    train = questions.questions(count, seed, "train")
    held_out = questions.questions(count, other, "held-out")
    assert len({q.question for q in train}) == len(train) == count
    assert not {q.question for q in train} & {q.question for q in held_out}
    assert not {q.id for q in train} & {q.id for q in held_out}


@given(st.lists(st.integers(0, 99), min_size=2, max_size=3), st.randoms())
def test_split_depends_on_the_numbers_and_not_on_their_order(numbers: list[int], rng: Any) -> None:
    shuffled = list(numbers)
    rng.shuffle(shuffled)
    wordings = (" * ".join(map(str, numbers)), f"Of {' and '.join(map(str, shuffled))}.")
    assert questions.split_of(wordings[0]) == questions.split_of(wordings[1])


def test_questions_depend_on_the_seed_and_fewer_are_a_prefix_of_more() -> None:
    assert questions.questions(20, 7, "train") == questions.questions(20, 7, "train")
    assert questions.questions(20, 7, "train") != questions.questions(20, 8, "train")
    assert questions.questions(20, 7, "train")[:5] == questions.questions(5, 7, "train")


def test_task_record_for_the_agent_has_no_answer() -> None:
    for question in questions.questions(50, 1, "train"):
        shown = questions.record(question, with_answer=False)
        assert set(shown) == {"id", "question"}
        assert questions.record(question, with_answer=True)["answer"] == question.answer


def test_answers_of_generated_questions_agree_with_the_calculator() -> None:
    checked = 0
    for question in questions.questions(200, 3, "train"):
        stated = re.search(r"\d+( [-+*] \d+)+", question.question)
        if stated:
            assert calculator.calculator(stated[0]) == str(question.answer)
            checked += 1
    assert checked > 100


# --- the calculator -----------------------------------------------------------------------------


@given(st.text(max_size=150) | st.text(alphabet="0123456789+-*/(). ", max_size=120))
def test_calculator_turns_any_text_into_a_number_or_an_error(text: str) -> None:
    try:
        result = calculator.calculator(text)
    except (calculator.MalformedExpression, calculator.CalculationError):
        return
    assert abs(float(result)) <= calculator.MAX_MAGNITUDE


@given(st.integers(-9999, 9999), st.integers(-9999, 9999), st.integers(1, 9999))
def test_calculator_computes_arithmetic(a: int, b: int, c: int) -> None:
    assert calculator.calculator(f"{a} * {b} - {c}") == str(a * b - c)
    assert calculator.calculator(f"({a} + {b}) * {c}") == str((a + b) * c)
    assert float(calculator.calculator(f"{a} / {c}")) == pytest.approx(
        float(Fraction(a, c)), rel=1e-3, abs=1e-6
    )


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "",
            " ",
            "12 x 7",
            "12 * ",
            "2 ** 9",
            "9**9**9**9",
            "7 // 2",
            "007 + 1",
            "1(2)",
            "(1, 2)",
        ),
        *("1,000 + 1", "3j", "1e400", "abs(1)", "__import__('os')", "().__class__", "True"),
        *("[1][0]", "(" * 60 + "1" + ")" * 60, "1" * 101, "1 + 1; 2", "1\n+ 1", "\x00"),
    ],
)
def test_text_that_is_no_expression_is_malformed(expression: str) -> None:
    with pytest.raises(calculator.MalformedExpression):
        calculator.calculator(expression)


@pytest.mark.parametrize("expression", ["1 / 0", "1 / (2 - 2)", "*".join(["99999"] * 15)])
def test_expression_without_a_result_is_an_error(expression: str) -> None:
    with pytest.raises(calculator.CalculationError):
        calculator.calculator(expression)


@pytest.mark.parametrize(
    ("expression", "shown"),
    [("6 / 3", "2"), ("1 / 3", "0.333333"), ("0.1 + 0.2", "0.3"), ("-5 + 2", "-3")],
)
def test_calculator_results_are_formatted_as_people_write_numbers(
    expression: str, shown: str
) -> None:
    assert calculator.calculator(expression) == shown


# --- tool status --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ('{"expression": "12 * 7"}', "ok"),
        ('{"expression": "12 / 0"}', "error"),
        ('{"expression": "twelve"}', "malformed"),
        ('{"expression": 84}', "malformed"),
        ('{"expression": null}', "malformed"),
        ('{"expression": "1", "more": 1}', "malformed"),
        ('{"text": "1"}', "malformed"),
        ("{}", "malformed"),
        ("[]", "malformed"),
        ("null", "malformed"),
        ("", "malformed"),
        ('{"expression": "12 *', "malformed"),
    ],
)
def test_arguments_of_a_calculator_call_decide_its_tool_status(arguments: str, status: str) -> None:
    assert attempts.run_call(attempts.Call("c1", "calculator", arguments)).status == status


def test_call_of_an_unknown_tool_has_the_tool_status_malformed() -> None:
    call = attempts.Call("c1", "search", '{"expression": "1"}')
    assert attempts.run_call(call).status == "malformed"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("84", None),
        ("The calculator says 84.", None),
        ("", None),
        ("(12 + 7) = 19", None),
        ("[calculator(expression=\"12 * 7')]", "malformed"),
        ('Sure: calculator(expression="12 * 7")', "malformed"),
        ('[calc(expression="12 * 7")', "malformed"),
        ('<tool_call>{"name": "calculator"', "malformed"),
    ],
)
def test_reply_text_that_looks_like_a_tool_call_has_the_tool_status_malformed(
    text: str, status: str | None
) -> None:
    attempt = attempts.conclude(attempts.Question("q", "?"), 0, attempts.Reply("r", text, None))
    assert (attempt.tool.status if attempt.tool else None) == status
    assert attempt.answer == text


def test_result_of_the_calculator_call_is_the_answer_of_the_attempt() -> None:
    call = attempts.Call("c1", "calculator", '{"expression": "12 * 7"}')
    attempt = attempts.conclude(attempts.Question("q", "?"), 3, attempts.Reply("r", "", call))
    assert (attempt.answer, attempt.sample, attempt.response_id) == ("84", 3, "r")


# --- the run ------------------------------------------------------------------------------------


class FakeModel:
    """Answers after a moment, fails where told to, and counts how many it serves at once."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.busy = self.busiest = 0

    async def ask(self, question: str) -> Any:
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        await asyncio.sleep(0.001)
        self.busy -= 1
        if question == self.failing:
            raise OSError("no route")
        return attempts.Reply(f"r-{question}", "1", None)


class Lines:
    """A stand-in for an output file that keeps whole lines and the flushes between them."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.flushed = 0

    def write(self, text: str) -> None:
        self.records.append(json.loads(text))

    def flush(self) -> None:
        self.flushed = len(self.records)

    def has_flushed(self, count: int) -> bool:
        return self.flushed == count


def test_question_is_run_as_soon_as_its_line_arrives_and_its_failure_stops_no_other() -> None:
    async def scenario() -> None:
        reading, writing = os.pipe()
        out, model = Lines(), FakeModel(failing="b")
        run = agent.Run(model, out, samples=3, concurrency=2)
        going = asyncio.create_task(run.read(reading))
        for seen, name in enumerate("abc", start=1):
            os.write(writing, json.dumps({"id": name, "question": name}).encode() + b"\n")
            await until(partial(out.has_flushed, 3 * seen))
        os.write(writing, b"not json\n")
        os.close(writing)
        await asyncio.wait_for(going, 30)
        os.close(reading)
        assert [r["error"] for r in out.records if r["id"] == "b"] == ["OSError: no route"] * 3
        assert [r["response_id"] for r in out.records if r["id"] == "c"] == ["r-c"] * 3
        assert sorted(r["sample"] for r in out.records if r["id"] == "a") == [0, 1, 2]
        assert model.busiest == 2
        assert run.unreadable == 1

    asyncio.run(scenario())


def test_stopped_run_ends_while_its_input_stays_open() -> None:
    async def scenario() -> None:
        reading, writing = os.pipe()
        out = Lines()
        run = agent.Run(FakeModel(), out, samples=2, concurrency=2)
        going = asyncio.create_task(run.read(reading))
        os.write(writing, b'{"id": "a", "question": "a"}\n')
        await until(lambda: bool(out.records))
        run.stop()
        await asyncio.wait_for(going, 30)
        assert all(r["error"] is None for r in out.records)
        os.close(writing)

    asyncio.run(scenario())


# --- the judge --------------------------------------------------------------------------------


def test_verdict_states_metrics_of_the_run_and_of_its_tool_call() -> None:
    tool = {"id": "c1", "name": "calculator", "status": "ok"}
    named = {"id": "c1", "name": "calculator"}
    result = {"id": "q", "response_id": "r1", "answer": "84", "tool": tool}
    told = {"task": {"id": "q", "answer": 84}, "output": json.dumps(result), "episode": "e"}
    assert judge.verdict(told) == [
        {"metric": "reward", "value": judge.RIGHT},
        {"metric": "success", "value": 1},
        {"metric": "tool_status", "value": "ok", "response": "r1", **named},
        {"metric": "well_formed", "value": 1},
    ]


@pytest.mark.parametrize(
    ("status", "well_formed"), [("ok", 1), ("error", 1), ("malformed", 0), (None, 0)]
)
def test_run_is_well_formed_if_it_called_its_tool_in_the_right_form(
    status: str | None, well_formed: int
) -> None:
    told = {"task": {"answer": 84}, "output": json.dumps(result("84", status))}
    assert judge.verdict(told)[-1] == {"metric": "well_formed", "value": well_formed}


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
def test_verdict_depends_on_answer_and_tool_status(
    answer: str | None, status: str | None, right: bool, reward: float
) -> None:
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


class Clock:
    """A clock that only sleeping moves, however busy the machine is."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(judge, "time", made)
    monkeypatch.setattr(judge, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(judge, "LONGEST_PAUSE", 0.001)
    return made


@pytest.mark.usefixtures("clock")
def test_feedback_delivery_retries_with_the_same_bytes() -> None:
    sent: list[bytes] = []

    def send(body: bytes) -> None:
        sent.append(body)
        if len(sent) < 4:
            raise [ConnectionRefusedError(), refusal(503), refusal(429)][len(sent) - 1]

    judge.deliver(send, [{"metric": "reward"}], patience=5.0)
    assert len(sent) == 4
    assert len(set(sent)) == 1


def test_feedback_delivery_retries_server_errors_within_patience_and_never_a_refusal(
    clock: Clock,
) -> None:
    tried: list[int] = []

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


def test_growing_file_of_results_is_read_to_its_end(tmp_path: Path) -> None:
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


def test_summary_has_the_success_rate_well_formed_rate_and_spread_of_the_verdicts() -> None:
    tally = judge.Tally()
    tally.verdicts["a"] = [judge.Verdict(True, 1.0, "ok"), judge.Verdict(False, 0.0, None)]
    tally.verdicts["b"] = [judge.Verdict(False, 0.0, "malformed")] * 2
    summary = tally.summary()
    assert (summary["success"], summary["well_formed"], summary["spread"]) == (0.25, 0.25, 0.5)
    assert judge.Tally().summary()["success"] is None
