"""Make torch deterministic: the same rows give the same bits.

On a CPU a scatter of float32 gradients uses atomic additions when several threads work, in
whatever order they come; on a GPU so do cuBLAS and scatters. torch's deterministic kernels
add in a fixed order. The result still depends on the number of threads, the kind of
processor and the build of torch.
"""

import os

import torch
import torch.utils.deterministic


def be_deterministic() -> None:
    """Make this process compute deterministically; call it before the first use of a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # A kernel without a deterministic variant (only on a GPU) warns, and training goes on.
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    # Filling costs time, and no uninitialised memory is read here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
