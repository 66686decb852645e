"""Set up a training process (deterministic kernels, attention, malloc), and measure its memory."""

import ctypes
import os
import re
import sys
from pathlib import Path
from typing import Final

import torch
import torch.utils.deterministic
from torch import Tensor
from transformers.integrations import sdpa_attention


def be_deterministic() -> None:
    """Make this process compute deterministically; call it before the first use of a GPU.

    By default, several threads of a CPU scatter float32 gradients by atomic additions in any order,
    and so do cuBLAS and scatters on a GPU. torch's deterministic kernels add in a fixed order. The
    result still depends on the number of threads, the kind of processor and the build of torch.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # A kernel without a deterministic variant (only on a GPU) warns, and training goes on.
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    # Filling costs time, and no uninitialised memory is read here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


_TRANSFORMERS_USE_GQA: Final = sdpa_attention.use_gqa_in_sdpa


def fuse_wide_attention() -> None:
    """Use fused attention for grouped heads in float32 on a GPU.

    CUDA's fused kernels for grouped heads take only 16 bits, and torch's fallback keeps all scores.
    The fused kernel for float32 needs a key and a value for each head, so these are repeated.
    """
    sdpa_attention.use_gqa_in_sdpa = _takes_grouped_heads


def _takes_grouped_heads(mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
    is_wide = key.is_cuda and key.dtype == torch.float32
    return not is_wide and _TRANSFORMERS_USE_GQA(mask, key, value)


# Options of mallopt, from malloc.h; their values are C ints.
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
INT_MAX: Final = 2**31 - 1


def keep_freed_memory() -> None:
    """Make malloc keep freed memory, for all threads; without glibc nothing changes.

    By default malloc maps each large block anew, and the page faults take a tenth of an update's
    time. So freed memory is kept during an update; `give_freed_memory_back` is called after it.
    """
    libc = _glibc()
    if libc is not None:
        # Updates run in their own thread, and only the first arena can grow without bounds.
        libc.mallopt(M_ARENA_MAX, 1)
        libc.mallopt(M_MMAP_THRESHOLD, INT_MAX)
        libc.mallopt(M_TRIM_THRESHOLD, INT_MAX)


def give_freed_memory_back() -> None:
    """Give freed memory back: malloc's to the system, and torch's to the GPU.

    A model server may share the GPU; between updates the memory is the server's.
    """
    torch.cuda.empty_cache()
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


# The file in which Linux says how much memory there is, and how much is free.
MEMINFO: Final = Path("/proc/meminfo")
# The folder with a container's memory, in Linux's control groups, version 2.
CGROUP: Final = Path("/sys/fs/cgroup")
# Share of a CPU's memory that training leaves free: with none left the kernel kills processes.
LEFT_FREE: Final = 0.1


def available_memory(device: torch.device) -> int:
    """Return how many bytes the trainer can still get on `device`; on a CPU, a tenth stays free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + unused
    total, available = (
        1024 * int(re.findall(rf"^{name}: +(\d+) kB$", MEMINFO.read_text(), re.MULTILINE)[0])
        for name in ("MemTotal", "MemAvailable")
    )
    room = available - LEFT_FREE * total
    if (limit := _limit_of_container()) is not None:
        used = int((CGROUP / "memory.current").read_text()) - _reclaimable_bytes()
        room = min(room, (1 - LEFT_FREE) * limit - used)
    return max(0, int(room))


def total_memory(device: str) -> int:
    """Return a device's total memory in bytes; for a CPU, the container's limit if it is lower."""
    if device != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(whole, _limit_of_container() or whole)


def _limit_of_container() -> int | None:
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else int(limit)


def _reclaimable_bytes() -> int:
    """Return the bytes of the container's memory that cache files, and can be reclaimed."""
    stat = (CGROUP / "memory.stat").read_text()
    return int(re.findall(r"^inactive_file (\d+)$", stat, re.MULTILINE)[0])
