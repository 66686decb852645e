"""The interface of a judge, and the parsing of answers into statements for `/feedback` (pure)."""

import math
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, Final, Protocol

import msgspec

from store.records import REWARD
from store.values.documents import parse

Statement = dict[str, Any]

TARGETS: Final = ("episode", "call", "response")
MAX_ANSWER: Final = 2**20


class JudgeError(Exception):
    """The judge cannot run as it is configured, or fails; the message says what to do."""


class JudgeFailed(JudgeError):
    """The judge gave no usable answer about an episode, which stays unscored."""


class Away(JudgeError):
    """A server does not answer now; the judgement is retried and does not count as a failure."""


class NotYet(JudgeError):
    """The judge cannot tell yet and must be asked again; this is not a failure."""


class Judge(Protocol):
    """Scores episodes: by a program, a model, the exit status of tests, or git."""

    @property
    def name(self) -> str:
        """Return the name under which the ledger stores this judge's verdicts."""

    async def judge(self, episode: str, line: bytes) -> list[Statement]:
        """Return the judge's statements about an episode; an empty list if it cannot tell.

        `episode` is the episode's key, and `line` its line in `pawl export`, without a newline.

        Raises:
            JudgeFailed: the judge gave no usable answer about this episode.
            NotYet: the evidence does not exist yet.
            Away: the judge cannot be reached now.
        """


def read_answer(answer: bytes, episode: str) -> list[Statement]:
    """Return the statements that a judge's program printed, or its function returned.

    `answer` is JSON: an object as `/feedback` takes it, or a list of them. A statement without a
    target is about `episode`. One whose `value` is null is left out: the judge cannot tell.

    Raises:
        JudgeFailed: the answer is not of this form, or longer than `MAX_ANSWER` bytes.
    """
    if len(answer) > MAX_ANSWER:
        raise JudgeFailed(
            f"the judge's answer has {len(answer)} bytes; at most {MAX_ANSWER} are read"
        )
    if not answer.strip():
        raise JudgeFailed(
            'the judge answered nothing; a judge that cannot tell prints {"value": null}'
        )
    try:
        document = parse(answer, Any)
    except ValueError as error:
        raise JudgeFailed(f"the judge's answer is not JSON ({error}): {_shown(answer)}") from error
    statements = document if isinstance(document, list) else [document]
    return [
        _with_target(statement, episode)
        for statement in statements
        if _checked_statement(statement).get("value") is not None
    ]


def read_verdict(answer: bytes, episode: str) -> list[Statement]:
    """Return the statements as `read_answer` does, also from a bare number or an object of metrics.

    `answer` is JSON: a number (the reward), an object of metrics, or statements as `/feedback`
    takes them. Null means that the judge cannot tell.

    Raises:
        JudgeFailed: the answer is none of these.
    """
    try:
        document = parse(answer, Any) if 0 < len(answer.strip()) <= MAX_ANSWER else None
    except ValueError:
        document = None
    if document is None:
        # Empty, null, too long, or not JSON: `read_answer` raises the error.
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
    """Return whether a value is a finite number, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _checked_statement(statement: Any) -> Statement:
    if isinstance(statement, dict) and "value" in statement:
        return statement
    shown = _shown(msgspec.json.encode(statement))
    raise JudgeFailed(
        f'each statement of a judge must be an object such as {{"value": 0.8}}, not {shown}'
    )


def _with_target(statement: Statement, episode: str) -> Statement:
    named = any(statement.get(target) is not None for target in TARGETS)
    return statement if named else statement | {"episode": episode}


def _shown(answer: bytes) -> str:
    return repr(answer[:80].decode(errors="replace"))


def idempotency_key(judge: str, episode: str) -> str:
    """Return the idempotency key of a judge's statements about an episode; retries share it."""
    return "judge-" + sha256(f"{judge}\0{episode}".encode(errors="surrogatepass")).hexdigest()


def metrics_of(statements: Iterable[Statement]) -> dict[str, float]:
    """Return the mean of each metric's numbers; metrics without numbers are left out."""
    values: dict[str, list[float]] = {}
    for statement in statements:
        value: Any = statement.get("value")
        if is_number(value):
            values.setdefault(str(statement.get("metric") or REWARD), []).append(value)
    return {metric: math.fsum(some) / len(some) for metric, some in values.items()}
