"""Read judges' answers as statements for `/feedback` (pure)."""

from hashlib import sha256
from typing import Any, Final, Protocol

import msgspec

from pawl.judging.errors import JudgeFailed
from store.values.documents import parse

Statement = dict[str, Any]

TARGETS: Final = ("episode", "call", "response")
MAX_ANSWER: Final = 2**20


class Judge(Protocol):
    """Answer about an episode: by a program (`ProgramJudge`) or by a model (`RubricJudge`)."""

    @property
    def name(self) -> str:
        """Return the name under which the ledger stores this judge's verdicts."""

    async def judge(self, episode: str, line: bytes) -> list[Statement]:
        """Return the judge's statements about an episode; an empty list if it cannot tell.

        Args:
            episode: the episode's key.
            line: the episode as `pawl export` writes it, without a newline.

        Raises:
            JudgeFailed: the judge gave no usable answer about this episode.
            Away: the judge cannot be reached now.
        """


def read_answer(answer: bytes, episode: str) -> list[Statement]:
    """Return the statements of an answer: a JSON object as `/feedback` takes it, or a list.

    A statement without a target is about `episode`. One whose `value` is null is left out: the
    judge cannot tell.

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
        _about(statement, episode)
        for statement in statements
        if _checked(statement).get("value") is not None
    ]


def _checked(statement: Any) -> Statement:
    if isinstance(statement, dict) and "value" in statement:
        return statement
    shown = _shown(msgspec.json.encode(statement))
    raise JudgeFailed(
        f'each statement of a judge must be an object such as {{"value": 0.8}}, not {shown}'
    )


def _about(statement: Statement, episode: str) -> Statement:
    named = any(statement.get(target) is not None for target in TARGETS)
    return statement if named else statement | {"episode": episode}


def _shown(answer: bytes) -> str:
    return repr(answer[:80].decode(errors="replace"))


def idempotency_key(judge: str, episode: str) -> str:
    """Return the idempotency key of a judge's answer about an episode, the same at each try."""
    return "judge-" + sha256(f"{judge}\0{episode}".encode(errors="surrogatepass")).hexdigest()
