"""Serve mixtures of experts with LoRA: on a CPU, experts are computed as without, not adapted.

As soon as LoRA is enabled vLLM wants Triton's kernels for the experts, whichever layers adapters
have; without triton-cpu the engine dies at the first request. Both functions stand where vLLM has
imported its own by name.
"""

from copy import copy
from typing import Any


def select_unquantized_moe_backend(moe_config: Any) -> Any:
    """Return the kernels that vLLM selects where LoRA is not enabled: the CPU's."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    without_lora = copy(moe_config)
    without_lora.is_lora_enabled = False
    return unquantized.select_unquantized_moe_backend(without_lora)


def get_supported_lora_modules(model: Any) -> list[str]:
    """Return the layers that adapters may have, without experts: vLLM refuses any other."""
    from vllm.lora import utils
    from vllm.model_executor.layers.fused_moe import MoERunner

    experts = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, MoERunner)
    }
    return [name for name in utils.get_supported_lora_modules(model) if name not in experts]
