"""The same rows give the same bits: what torch has to be told for that.

On a CPU a scatter of float32 gradients adds with atomic operations where several threads
work, in whatever order they come; on a GPU cuBLAS and scatters likewise. torch's
deterministic kernels add in a fixed order. They hold for one number of threads, one kind of
processor and one build of torch.
"""

import os

import torch
import torch.utils.deterministic


def be_deterministic() -> None:
    """Have this process compute alike every time; before its first use of a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # A kernel without a deterministic form (on a GPU alone) warns, and training goes on.
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    # Memory that nobody reads before it is written needs no filling.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
