"""What a judge answers, as statements for /feedback (pure)."""

from hashlib import sha256
from typing import Any, Final, Protocol

import msgspec

from pawl.judging.errors import JudgeFailed
from store.documents import parse

Statement = dict[str, Any]

TARGETS: Final = ("episode", "call", "response")
MAX_ANSWER: Final = 2**20


class Judge(Protocol):
    """Says of an episode what it is worth."""

    @property
    def name(self) -> str:
        """Under which it is remembered what it was asked."""

    async def judge(self, episode: str, line: bytes) -> list[Statement]:
        """Its statements about the episode of that key; none where it cannot tell.

        `line` is the episode as `pawl export` writes it.

        Raises:
            JudgeFailed: it gave no answer that can be used.
            Away: it cannot be asked now.
        """


def read_answer(answer: bytes, episode: str) -> list[Statement]:
    """The statements of an answer: one object, or a list of them, in the form of /feedback.

    What names no target is about `episode`. A `value` of null is no statement: the judge
    cannot tell.

    Raises:
        JudgeFailed: it is none.
    """
    if len(answer) > MAX_ANSWER:
        raise JudgeFailed(f"its answer has {len(answer)} bytes; {MAX_ANSWER} are read")
    if not answer.strip():
        raise JudgeFailed('it answered nothing; print {"value": null} where it cannot tell')
    try:
        said = parse(answer, Any)
    except ValueError as error:
        raise JudgeFailed(f"its answer is not JSON ({error}): {_shown(answer)}") from error
    statements = said if isinstance(said, list) else [said]
    return [
        _about(statement, episode)
        for statement in statements
        if _checked(statement).get("value") is not None
    ]


def _checked(statement: Any) -> Statement:
    if isinstance(statement, dict) and "value" in statement:
        return statement
    shown = _shown(msgspec.json.encode(statement))
    raise JudgeFailed(f'each statement must be an object such as {{"value": 0.8}}, not {shown}')


def _about(statement: Statement, episode: str) -> Statement:
    named = any(statement.get(target) is not None for target in TARGETS)
    return statement if named else statement | {"episode": episode}


def _shown(said: bytes) -> str:
    return repr(said[:80].decode(errors="replace"))


def idempotency_key(judge: str, episode: str) -> str:
    """Under which a judge's answer about an episode is posted, whenever that is tried."""
    return "judge-" + sha256(f"{judge}\0{episode}".encode(errors="surrogatepass")).hexdigest()
