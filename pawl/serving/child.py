"""`python -m pawl.serving.child keeper|worker …`: one of the supervisor's processes."""

import argparse
import asyncio
import gc
import os
import signal
import socket
from typing import Final

import uvloop

from pawl.logs import configure_logging
from proxy.counting import shared
from proxy.counting.board import Board
from proxy.settings import ProxySettings

PATIENCE_S: Final = 30.0
KEEPER_NICENESS: Final = 10
GC_THRESHOLDS: Final = (20_000, 20, 20)


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


def spare_the_collector() -> None:
    """What is there now lives as long as the process: the collector need not look at it again.

    A call leaves no cycles behind, so that it need not look often either.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _is_up(ready: int) -> None:
    """Tell the supervisor; one that is gone is noticed elsewhere."""
    try:
        os.write(ready, b"up")
    except BrokenPipeError:
        return
    finally:
        os.close(ready)


async def _keep(ready: int, board: int) -> None:
    from proxy.keeping.keeper import keeping

    spare_the_collector()
    # Records can wait on disk; calls and streams cannot wait for their records to be stored.
    os.nice(KEEPER_NICENESS)
    # A predecessor whose supervisor was killed stores what it can before it ends.
    async with keeping(ProxySettings(), patience_s=PATIENCE_S, processes=Board(board).read):
        _is_up(ready)
        await _until_told()


async def _work(ready: int, listener: int) -> None:
    from proxy.worker import serving

    spare_the_collector()
    async with serving(ProxySettings(), socket.socket(fileno=listener)):
        _is_up(ready)
        await _until_told()


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["keeper", "worker"])
    for descriptor in ("--ready", "--board", "--listener"):
        parser.add_argument(descriptor, type=int)
    parser.add_argument("--counters", type=int, nargs="+")
    told = parser.parse_args()
    configure_logging(gather=told.kind == "worker")
    # Before what is imported below makes its metrics.
    shared.share(told.counters)
    if told.kind == "keeper":
        uvloop.run(_keep(told.ready, told.board))
    else:
        uvloop.run(_work(told.ready, told.listener))


if __name__ == "__main__":
    main()
