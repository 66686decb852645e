"""Define the scenarios' exception."""


class ScenarioFailed(Exception):
    """Report that a scenario cannot be run, or could not go on; the message says why."""
