"""The exceptions of the runner."""


class RolloutError(Exception):
    """The runner cannot work like this; the message names the option or line, and the remedy."""


class RunLost(Exception):
    """A run that ended through no fault of its own; it is done again, as a new episode."""


class Refused(Exception):
    """`/feedback` refuses statements for what they say; sent again they would be refused again."""
