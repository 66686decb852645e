"""Define the exceptions of judging."""


class JudgeError(Exception):
    """Report that the judge cannot run as it is configured; the message says what to do."""


class JudgeFailed(JudgeError):
    """Report that the judge gave no usable answer about an episode, which stays unscored."""


class Away(JudgeError):
    """Report that a server does not answer now; the judgement is retried, and not a failure."""
