"""Turn what a run came to into statements for `/feedback` (pure)."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from pawl.judging.answers import MAX_ANSWER, Statement, read_answer
from pawl.judging.errors import JudgeFailed
from store.records import REWARD
from store.values.documents import parse

# How far a number may be from the one that is asked for, as a share of it.
TOLERANCE: Final = 1e-6


def read_verdict(answer: bytes, episode: str) -> list[Statement]:
    """Return the statements of a judge's answer about a run.

    The answer is a number (the reward), an object of metrics, or statements as `/feedback` takes
    them. Null means that the judge cannot tell.

    Raises:
        JudgeFailed: the answer is none of these.
    """
    try:
        document = parse(answer, Any) if 0 < len(answer.strip()) <= MAX_ANSWER else None
    except ValueError:
        document = None
    if document is None:
        # Nothing, null, too much, or no JSON: what is wrong is said as to any judge.
        return [] if answer.strip() == b"null" else read_answer(answer, episode)
    if is_number(document):
        return [{"metric": REWARD, "value": document, "episode": episode}]
    if isinstance(document, dict) and document and "value" not in document:
        return _metrics(document, episode)
    if isinstance(document, dict | list):
        return read_answer(answer, episode)
    raise JudgeFailed(
        f"the judge's answer must be a number, or an object of metrics such as "
        f'{{"reward": 0.8}}, not {document!r:.80}'
    )


def _metrics(document: Mapping[str, Any], episode: str) -> list[Statement]:
    for metric, value in document.items():
        if not (value is None or isinstance(value, bool | str) or is_number(value)):
            raise JudgeFailed(
                f"the judge's metric {metric!r:.80} must be a finite number, true, false or a text,"
                f" not {value!r:.80}"
            )
    return [
        {"metric": metric, "value": value, "episode": episode}
        for metric, value in document.items()
        if value is not None
    ]


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, and no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def compare(output: str, expected: Any) -> float:
    """Return 1.0 if the last line of an output is the answer, else 0.0.

    Numbers are compared as numbers, texts without regard to case and spacing; of a list of answers
    each is right.
    """
    given = output.strip().rpartition("\n")[2]
    answers = expected if isinstance(expected, list) else [expected]
    return float(any(_same(given, answer) for answer in answers))


def _same(given: str, answer: Any) -> bool:
    if isinstance(answer, dict | list | bool) or answer is None:
        try:
            document = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError):
            return False
        # 1 equals true in Python.
        return type(document) is type(answer) and bool(document == answer)
    mine, theirs = _number(given), _number(str(answer))
    if mine is not None and theirs is not None:
        return math.isclose(mine, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return _plain(given) == _plain(str(answer))


def _number(text: str) -> float | None:
    """Return the number that a text is, apart from spaces, commas and a final full stop."""
    try:
        number = float(text.strip().removesuffix(".").replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _plain(text: str) -> str:
    return " ".join(text.split()).removesuffix(".").casefold()


def reward_of(statements: Iterable[Statement]) -> float | None:
    """Return the mean of the rewards that statements give, or None if they give none."""
    return metrics_of(statements).get(REWARD)


def metrics_of(statements: Iterable[Statement]) -> dict[str, float]:
    """Return the mean value of each metric of some statements that has numbers."""
    values: dict[str, list[float]] = {}
    for statement in statements:
        value: Any = statement.get("value")
        if is_number(value):
            values.setdefault(str(statement.get("metric") or REWARD), []).append(value)
    return {metric: math.fsum(some) / len(some) for metric, some in values.items()}
