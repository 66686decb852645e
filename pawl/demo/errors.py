"""What ends the demo early."""


class DemoFailed(Exception):
    """The demo could not go on; the message says why and where to look."""
