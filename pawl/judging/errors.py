"""Define the exceptions of judging, and what of them is kept in the ledger."""

from typing import Final

MAX_REASON: Final = 1000


class JudgeError(Exception):
    """Report that the judge cannot run as it is configured; the message says what to do."""


class JudgeFailed(JudgeError):
    """Report that the judge gave no usable answer about an episode, which stays unscored."""


class Away(JudgeError):
    """Report that a server does not answer now; the judgement is retried, and not a failure."""


def reason_of(error: Exception) -> str:
    """Return an exception's message as the ledger keeps it: cut, and without what no text holds."""
    return str(error).replace("\x00", "")[:MAX_REASON]
