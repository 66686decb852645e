"""`python -m pawl.serving.child keeper|worker …`: one of the supervisor's processes."""

import argparse
import asyncio
import gc
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

import uvloop

from pawl.logs import configure_logging
from pawl.serving.ending import LEAVE, LEAVE_S, STOP
from proxy.counting import shared
from proxy.counting.board import Board
from proxy.settings import ProxySettings

PATIENCE_S: Final = 30.0
KEEPER_NICENESS: Final = 10
GC_THRESHOLDS: Final = (20_000, 20, 20)


def _no_hurry() -> None:
    """Nothing is under way that would have to be hurried."""


async def _until_told(
    stop_soon: Callable[[], None] = _no_hurry, leave: Callable[[], None] = _no_hurry
) -> None:
    """Wait until SIGTERM, SIGHUP, or the supervisor's end, with which standard input ends.

    `stop_soon` is called on each SIGTERM, also on one that comes later; `leave` on the others.
    """
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(then: Callable[[], None]) -> None:
        then()
        told.set()

    loop.add_signal_handler(STOP, on_signal, stop_soon)
    loop.add_signal_handler(LEAVE, on_signal, leave)
    # Ctrl-C reaches the whole group; the supervisor decides what it means.
    loop.add_signal_handler(signal.SIGINT, lambda: None)

    def on_input() -> None:
        if not os.read(0, 64):
            on_signal(leave)
            loop.remove_reader(0)

    loop.add_reader(0, on_input)
    await told.wait()


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
    settings = ProxySettings()
    async with serving(settings, socket.socket(fileno=listener)) as server:
        _is_up(ready)
        await _until_told(
            partial(server.finish_within, settings.calls_end_s),
            partial(server.finish_within, LEAVE_S),
        )


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
