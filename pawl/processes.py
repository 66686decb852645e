"""Helpers for Pawl's processes: start, imports, and end."""

import asyncio
import atexit
import ctypes
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

PR_SET_PDEATHSIG: Final = 1
# OpenMP's threads spin while they wait for each other, and take cores from other processes on the
# machine: the demo took 1.6 times as long, and twice the processor time. With this value GNU's
# OpenMP, which torch brings, does not spin. A user's own value is kept.
PASSIVE_WAITING: Final = ("OMP_WAIT_POLICY", "PASSIVE")
# As long as the Helm chart's probes tolerate a silent `/healthz`.
HUNG_S: Final = 60.0


def run_module(name: str) -> list[str]:
    """Return the command line that runs a module with this Python; append its arguments.

    `-P`: the working directory, an agent's project, may have a folder `proxy` or `store`.
    """
    return [sys.executable, "-P", "-m", name]


def gpu_environment(gpus: Sequence[int]) -> dict[str, str]:
    """Return environment variables that limit CUDA to these GPUs, numbered as by nvidia-smi.

    The result is empty if `gpus` is: CUDA then shows the same GPUs as in this process.
    """
    if not gpus:
        return {}
    # By default CUDA numbers GPUs by speed.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


def wait_passively() -> None:
    """Make OpenMP's threads sleep while they wait, here and in children.

    Call this before torch is imported, which reads the variable.
    """
    os.environ.setdefault(*PASSIVE_WAITING)


def spinning_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make waiting threads spin in spite of `wait_passively`.

    GOMP_SPINCOUNT overrides OMP_WAIT_POLICY, see the manual of GNU's libgomp.
    """
    name, passive = PASSIVE_WAITING
    quiet = {name: ("", passive), "GOMP_SPINCOUNT": ("", "0")}
    return {
        name: environment[name]
        for name, values in quiet.items()
        if environment.get(name, "").strip().upper() not in values
    }


def lower_priority(niceness: int = 10) -> None:
    """Lower this process's CPU priority.

    Linux first divides cores among sessions (`sched_autogroup`, see sched(7)), so a process that
    leads a session lowers the whole session's priority.
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        # Kernels without autogroups have no such file.
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness))


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this child the signal `by` when its parent ends in any way.

    Linux only: `PR_SET_PDEATHSIG`, see prctl(2).
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, in the running loop."""
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    return stop


async def end_if_hung(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and end the process with status 1 if its event loop hangs for `HUNG_S` seconds.

    A hung process answers no request, not even `/healthz`. Its supervisor restarts it; standard
    error has the tracebacks of its threads.
    """

    async def postpone() -> None:
        while True:
            faulthandler.dump_traceback_later(HUNG_S, exit=True)
            await asyncio.sleep(HUNG_S / 10)

    postponing = asyncio.create_task(postpone())
    try:
        await work
    finally:
        postponing.cancel()
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def large_imports() -> Iterator[None]:
    """Disable garbage collection in the block, and exempt objects that exist at its end.

    Modules live as long as the process. Scanning those of torch, transformers and TRL repeatedly
    takes a seventh of the processor time of their import, and later, in a trainer of several
    policies, a part of every turn.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        # Without this, libraries complain of leftover objects at the process's exit.
        atexit.register(gc.unfreeze)
