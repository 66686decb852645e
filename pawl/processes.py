"""Share what Pawl's processes have in common: their start, their imports, and their end."""

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
# Threads of OpenMP spin while they wait for each other, and so burn the cores that the other
# processes of one machine need: the demo took 1.6 times as long, and twice the processor time.
# GNU's OpenMP, which torch brings, spins not at all by this; a user's own value stands.
PASSIVE_WAITING: Final = ("OMP_WAIT_POLICY", "PASSIVE")
# As long as the chart's probes wait for `/healthz`.
HUNG_S: Final = 60.0


def run_module(name: str) -> list[str]:
    """Return the command line that runs a module with this Python; append its arguments.

    `-P`: an agent's project, the working directory, may well have a folder `proxy` or `store`.
    """
    return [sys.executable, "-P", "-m", name]


def showing_gpus(gpus: Sequence[int]) -> dict[str, str]:
    """Return the variables by which CUDA shows only these GPUs, as nvidia-smi numbers them.

    They are empty, and CUDA shows what it did before, without a GPU.
    """
    if not gpus:
        return {}
    # CUDA's own order is by speed.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


def wait_passively() -> None:
    """Let threads of OpenMP sleep while they wait, here and in children.

    It is read when torch is first imported, so this comes before.
    """
    os.environ.setdefault(*PASSIVE_WAITING)


def spinning_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment by which waiting threads spin all the same.

    GOMP_SPINCOUNT overrides OMP_WAIT_POLICY, see the manual of GNU's libgomp.
    """
    name, passive = PASSIVE_WAITING
    quiet = {name: ("", passive), "GOMP_SPINCOUNT": ("", "0")}
    return {
        name: environment[name]
        for name, values in quiet.items()
        if environment.get(name, "").strip().upper() not in values
    }


def yield_cores(niceness: int = 10) -> None:
    """Let other processes have the cores first, where there are not enough of them.

    Linux shares cores among sessions before it looks at a process (`sched_autogroup`, see
    sched(7)), so a session of one's own steps back as a whole.
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        # Kernels without it have no such file.
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness))


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this child the signal `by` when its parent ends, however it ends.

    Linux only: `PR_SET_PDEATHSIG`, see prctl(2).
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, in the loop that runs now."""
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    return stop


async def end_if_hung(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and end the process with status 1 if its event loop stands still for `HUNG_S` s.

    It answers nobody then, on `/healthz` neither. Whoever has started it starts it again; standard
    error shows where its threads were.
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
    """Import within the block without garbage collection, and exempt from it what is there then.

    Modules live as long as the process. To go through those of torch, transformers and TRL again
    and again takes a seventh of the processor time of their import, and later, in a trainer of
    several policies, a part of every turn.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        # At its end the process looks through all of it, or libraries complain of leftovers.
        atexit.register(gc.unfreeze)
