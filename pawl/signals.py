"""Learn of the signals that tell a process to end."""

import asyncio
import signal


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, in the loop that runs now."""
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    return stop
