"""Run a child process of the supervisor: `python -m pawl.serving.child ingester|worker …`."""

import argparse
import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Final

import structlog
import uvloop

from pawl.logs import configure_logging
from pawl.processes import end_if_hung
from pawl.serving.process import DISK_FAILS, LEAVE, LEAVE_S, MOST_REPORTED, STOP, UP
from proxy.errors import ProxyError
from proxy.settings import ProxySettings
from proxy.shared_memory import PINS_FILE, read_states, share_metrics_in
from proxy.spool.folders import PASSING_ERRORS
from store.errors import StoreError

log = structlog.get_logger()

PATIENCE_S: Final = 30.0
INGESTER_NICENESS: Final = 10
GC_THRESHOLDS: Final = (20_000, 20, 20)
LARGE_BYTES: Final = 2**20
_M_MMAP_THRESHOLD: Final = -3
_M_TRIM_THRESHOLD: Final = -1


async def _until_stopped(
    stop_soon: Callable[[], None] | None = None, leave: Callable[[], None] | None = None
) -> None:
    """Wait until SIGTERM, SIGHUP, or the supervisor's end, which closes standard input.

    Args:
        stop_soon: called on each SIGTERM, even after this function has returned.
        leave: called on SIGHUP, and when the supervisor has ended.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(then: Callable[[], None] | None) -> None:
        if then is not None:
            then()
        stopped.set()

    loop.add_signal_handler(STOP, on_signal, stop_soon)
    loop.add_signal_handler(LEAVE, on_signal, leave)
    # Ctrl-C reaches the whole process group; the supervisor alone acts on it.
    loop.add_signal_handler(signal.SIGINT, lambda: None)

    def on_input() -> None:
        if not os.read(0, 64):
            on_signal(leave)
            loop.remove_reader(0)

    loop.add_reader(0, on_input)
    await stopped.wait()


def exempt_present_objects() -> None:
    """Exempt all present objects from garbage collection, and make collection rare.

    Present objects live as long as the process, and calls leave no reference cycles behind.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def return_large_blocks() -> None:
    """Make glibc return freed blocks of `LARGE_BYTES` and more to the system at once.

    By default, once it has freed a block of up to 32 MiB, glibc keeps later blocks of that size for
    reuse (mallopt(3)): after a few large requests, a worker's memory would stay high.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        # Setting one threshold fixes the other at 128 KiB, unless it is set too: the heap would
        # then grow and shrink with ordinary bodies.
        mallopt(_M_TRIM_THRESHOLD, 2 * LARGE_BYTES)


def _report(ready: IO[bytes], report: bytes = UP) -> None:
    """Tell the supervisor that this process is up, or why it cannot start.

    If the supervisor has ended, do nothing: `_until_stopped` notices it.
    """
    with suppress(BrokenPipeError), ready:
        ready.write(report)


async def _run_ingester(ready: IO[bytes], shared: Path) -> None:
    from proxy.ingester.ingester import run_ingester

    exempt_present_objects()
    # Calls come first: records can wait on disk, but clients wait for their replies.
    os.nice(INGESTER_NICENESS)
    # The ingester of a killed supervisor holds the spool while it drains: wait for it.
    states = partial(read_states, shared)
    async with run_ingester(ProxySettings(), patience_s=PATIENCE_S, processes=states):
        _report(ready)
        await _until_stopped()


async def _run_worker(ready: IO[bytes], shared: Path, listener: int) -> None:
    from proxy.policies.shared_pins import SharedPins
    from proxy.worker import run_worker

    exempt_present_objects()
    return_large_blocks()
    settings = ProxySettings()
    bound = socket.socket(fileno=listener)
    pins = SharedPins(os.open(shared / PINS_FILE, os.O_RDWR | os.O_CREAT, 0o600))

    def stopping() -> bool:
        return all(one.state == "stopping" for one in read_states(shared))

    async with run_worker(settings, bound, pins, stopping) as server:
        _report(ready)
        await _until_stopped(
            partial(server.finish_within, settings.calls_end_s),
            partial(server.finish_within, LEAVE_S),
        )


def main() -> None:
    """Run the ingester or a worker, as the arguments say, until a signal ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["ingester", "worker"])
    parser.add_argument("--shared", type=Path)
    for descriptor in ("--ready", "--listener"):
        parser.add_argument(descriptor, type=int)
    arguments = parser.parse_args()
    configure_logging(buffered=arguments.kind == "worker")
    # Must come before the imports in `_run_ingester` and `_run_worker`: these create the metrics.
    share_metrics_in(arguments.shared)
    ready = os.fdopen(arguments.ready, "wb", buffering=0)
    try:
        if arguments.kind == "ingester":
            uvloop.run(end_if_hung(_run_ingester(ready, arguments.shared)))
        else:
            uvloop.run(end_if_hung(_run_worker(ready, arguments.shared, arguments.listener)))
    except (OSError, StoreError, ProxyError) as error:
        if isinstance(error, OSError) and error.errno in PASSING_ERRORS:
            log.error("disk_fails", reason=str(error))
            sys.exit(DISK_FAILS)
        if ready.closed:
            raise
        _report(ready, str(error).encode()[:MOST_REPORTED])
        sys.exit(2)


if __name__ == "__main__":
    main()
