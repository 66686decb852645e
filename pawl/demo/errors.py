"""The demo's exception."""


class DemoFailed(Exception):
    """The demo could not go on; the message says why, and which log to look at."""
