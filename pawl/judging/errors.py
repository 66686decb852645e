"""The exceptions of judging."""


class JudgeError(Exception):
    """The judge cannot run as it is configured; the message says what to do."""


class JudgeFailed(JudgeError):
    """The judge gave no usable answer about an episode; the episode stays unscored."""


class Away(JudgeError):
    """A server does not answer now. No episode's judgement counts as failed; it is retried."""
