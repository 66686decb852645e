"""Check the machine before anything is started; each failure is one line with a remedy."""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from store import install_command

GIB: Final = 2**30
MEMORY_GIB: Final = 6
DISK_GIB: Final = 3
# PyPI has only the CUDA build of torch.
TORCH_FOR_CPUS: Final = "--extra-index-url https://download.pytorch.org/whl/cpu"


class NotReady(Exception):
    """Report that the machine lacks something that the stack needs; the message says what to do."""


def check_ports(ports: dict[str, int]) -> None:
    """Check that all ports are free on 127.0.0.1; `ports` maps settings to ports.

    Raises:
        NotReady: a port is taken.
    """
    for setting, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise NotReady(
                    f"port {port} of {setting} is taken: stop the program that listens there, "
                    "or set another port"
                ) from error


def check_memory(needed_gib: float = MEMORY_GIB) -> None:
    """Check that `needed_gib` GiB of memory are available.

    Raises:
        NotReady: there is less, or the system does not say how much there is.
    """
    found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if found is None:
        raise NotReady(
            "this system does not say how much memory is free (no MemAvailable in /proc/meminfo): "
            "run the stack on Linux"
        )
    available = int(found[1]) * 1024 / GIB
    if available < needed_gib:
        raise NotReady(
            f"{available:.1f} GiB of memory are free, {needed_gib:g} are needed: "
            "close other programs, or use a larger machine"
        )


def check_folder(setting: str, folder: Path) -> None:
    """Make the folder that a setting names if it is missing, and check that it is writable.

    Raises:
        NotReady: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise NotReady(
            f"{setting}={folder} cannot be made: {error.strerror}: set another folder"
        ) from error
    if not is_writable:
        raise NotReady(f"{setting}={folder} cannot be written to by this user: set another folder")


def check_disk(folder: Path, needed_gib: float = DISK_GIB) -> None:
    """Check that the disk of `folder`, which need not exist yet, has `needed_gib` GiB free.

    Raises:
        NotReady: there is less.
    """
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / GIB
    if free < needed_gib:
        raise NotReady(
            f"{free:.1f} GiB are free on the disk of {folder}, {needed_gib:g} are needed: "
            "delete files, or choose a folder on another disk"
        )


def check_gpus(variable: str, gpus: Sequence[int]) -> None:
    """Check that the GPUs that a setting names exist: CUDA ignores missing ones silently.

    Raises:
        NotReady: a GPU is missing, or there is no NVIDIA driver.
    """
    if not gpus:
        return
    program = shutil.which("nvidia-smi")
    if program is None:
        raise NotReady(
            f"{variable} names GPUs, but this machine has no NVIDIA driver (no nvidia-smi): "
            f"install it, or remove {variable}"
        )
    command = [program, "--query-gpu=index", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReady(f"nvidia-smi fails, so no GPU can be used: {done.stdout}{done.stderr}")
    present = {int(line) for line in done.stdout.split()}
    if absent := sorted(set(gpus) - present):
        raise NotReady(
            f"{variable} names the GPU {absent[0]}, which is not there: nvidia-smi lists "
            f"{', '.join(map(str, sorted(present))) or 'none'}"
        )


def check_dtype(dtype: str | None, *, on_gpu: bool) -> None:
    """Check that vLLM can serve adapters in the number format of PAWL_VLLM_DTYPE.

    Raises:
        NotReady: it is float32 on a GPU, which vLLM's LoRA kernels refuse.
    """
    if dtype == "float32" and on_gpu:
        raise NotReady(
            "PAWL_VLLM_DTYPE=float32: vLLM serves no LoRA adapters in float32 on a GPU: remove "
            "PAWL_VLLM_DTYPE, and vLLM computes in bfloat16"
        )


def check_vllm() -> None:
    """Check that vLLM is installed.

    Raises:
        NotReady: it is not; the message ends with the remedy.
    """
    if importlib.util.find_spec("vllm") is None:
        raise NotReady(
            "vLLM is not installed: set PAWL_UPSTREAM_URL to a model server of your own, or run "
            f"`{install_command('serve-gpu')}`; without a GPU, as PyPI has no build of torch for "
            f"CPUs, `{install_command('serve-cpu')} {TORCH_FOR_CPUS}`"
        )


def torch_failure(reason: str) -> str:
    """Return the message for a failed import of torch, or of a package that needs it."""
    return (
        f"the trainer cannot be imported: {reason}. torch is missing, or its build does not fit "
        f"Python {sys.version_info[0]}.{sys.version_info[1]} and this machine: run `make install "
        f"PYTHON=python3.11`, or `{install_command('trainer')}`, without a GPU with "
        f"{TORCH_FOR_CPUS}"
    )


def check_torch() -> None:
    """Check, in a separate process, that torch can be imported.

    A build for another machine fails at import, such as the CUDA build where there is no CUDA.

    Raises:
        NotReady: it cannot be imported; the message ends with the remedy.
    """
    command = [sys.executable, "-P", "-c", "import torch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise NotReady(torch_failure(lines[-1]))
