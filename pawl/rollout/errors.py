"""Define the exceptions of the runner."""


class RolloutError(Exception):
    """Report that the runner cannot work like this, by which option or line, and the remedy."""


class RunLost(Exception):
    """Report that a run ended through no fault of its own; it is done again, as a new episode."""


class WorkerCrashed(RunLost):
    """Report that a worker crashed under several runs, and any of them may be to blame."""


class Refused(Exception):
    """Report that `/feedback` refuses statements for what they say, and would refuse them again."""
