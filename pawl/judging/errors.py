"""What can go wrong in judging."""


class JudgeError(Exception):
    """The judge cannot run like this; the message says what to do."""


class JudgeFailed(JudgeError):
    """No answer about one episode that can be used; the episode stays unscored."""


class Away(JudgeError):
    """A server does not answer, or not now: no episode's fault, and asked again later."""
