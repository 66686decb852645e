"""`python -m pawl.serving.child keeper | worker FD`: one of the supervisor's processes."""

import asyncio
import os
import signal
import socket
import sys
from typing import Final

import uvloop

from pawl.logs import configure_logging
from proxy.settings import ProxySettings

PATIENCE_S: Final = 30.0


async def _until_told() -> None:
    """Until SIGTERM, or until the supervisor is gone: standard input ends then."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # Ctrl-C reaches the whole group; the supervisor decides what it means.
    loop.add_signal_handler(signal.SIGINT, lambda: None)

    def on_input() -> None:
        if not os.read(0, 64):
            stop.set()
            loop.remove_reader(0)

    loop.add_reader(0, on_input)
    await stop.wait()


async def _keep() -> None:
    from proxy.keeper import keeping

    # A predecessor whose supervisor was killed stores what it can before it ends.
    async with keeping(ProxySettings(), patience_s=PATIENCE_S):
        await _until_told()


async def _work(fd: int) -> None:
    from proxy.worker import freeze, serving

    freeze()
    async with serving(ProxySettings(), socket.socket(fileno=fd)):
        await _until_told()


def main() -> None:
    """Run one of the two."""
    configure_logging(gather=sys.argv[1] == "worker")
    if sys.argv[1] == "keeper":
        uvloop.run(_keep())
    else:
        uvloop.run(_work(int(sys.argv[2])))


if __name__ == "__main__":
    main()
