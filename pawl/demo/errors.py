"""Define the demo's exception."""


class DemoFailed(Exception):
    """Report that the demo could not go on; the message says why, and which log to look at."""
