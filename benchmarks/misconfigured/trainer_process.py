"""Run `pawl trainer`, whose memory is full for as long as a file exists.

`python -m benchmarks.misconfigured.trainer_process FILE`: torch raises what it raises of a GPU
that another process has filled, wherever the base model computes. The product knows nothing of it.
"""

import sys
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaModel

from pawl.cli import main as pawl


def fill_memory_while_there_is(file: Path) -> None:
    """Let the model run out of memory while `file` exists."""
    real = LlamaModel.forward

    @wraps(real)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if file.exists():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(*args, **kwargs)

    LlamaModel.forward = forward


if __name__ == "__main__":
    fill_memory_while_there_is(Path(sys.argv[1]))
    sys.argv = ["pawl", "trainer"]
    pawl()
