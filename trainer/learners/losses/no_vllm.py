"""Keep vLLM out of the trainer's process.

Where vLLM is installed, TRL imports it with its GRPO trainer, which is able to generate with it.
Nothing is generated here, and vLLM would double the processor time of a trainer's start.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from trl import import_utils


@contextmanager
def no_vllm() -> Iterator[None]:
    """Let TRL find no vLLM while its trainers are imported within the block."""
    real = import_utils.is_vllm_available
    import_utils.is_vllm_available = lambda *_, **__: False
    try:
        yield
    finally:
        import_utils.is_vllm_available = real
