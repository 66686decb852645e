"""Replace vLLM's LoRA operations by those of `ops`, or raise `UnsupportedVLLMError`."""

import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from types import ModuleType
from typing import Any

from pawl_cpu_lora import ops

SUPPORTED_VLLM = "0.32.0"

# vLLM imports these functions by name, so each module holds its own reference.
PATCHED_MODULES = (
    "vllm.lora.ops.torch_ops.lora_ops",
    "vllm.lora.ops.torch_ops",
    "vllm.lora.punica_wrapper.punica_cpu",
)

REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "bgmv_shrink": ops.bgmv_shrink,
    "bgmv_expand": ops.bgmv_expand,
    "bgmv_expand_slice": ops.bgmv_expand_slice,
    "sgmv_shrink": ops.sgmv_shrink,
    "sgmv_expand": ops.sgmv_expand,
    "sgmv_expand_slice": ops.sgmv_expand_slice,
}

# On a CPU, experts of a mixture are computed without adapters. If LoRA is enabled, vLLM selects
# Triton's kernels for them, whichever layers adapters have, and without triton-cpu the engine dies
# at the first request. The next two functions replace vLLM's functions of the same names.


def select_unquantized_moe_backend(moe_config: Any) -> Any:
    """Return the CPU's kernels for experts, which vLLM selects if LoRA is not enabled."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    without_lora = copy(moe_config)
    without_lora.is_lora_enabled = False
    return unquantized.select_unquantized_moe_backend(without_lora)


def get_supported_lora_modules(model: Any) -> list[str]:
    """Return the names of layers that an adapter may change: vLLM's list without experts."""
    from vllm.lora import utils
    from vllm.model_executor.layers.fused_moe import MoERunner

    experts = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, MoERunner)
    }
    return [name for name in utils.get_supported_lora_modules(model) if name not in experts]


# Replacements for experts, by the module whose reference is replaced.
OF_EXPERTS: dict[str, dict[str, Callable[..., Any]]] = {
    "vllm.lora.model_manager": {"get_supported_lora_modules": get_supported_lora_modules},
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": {
        "select_unquantized_moe_backend": select_unquantized_moe_backend
    },
}

# vLLM sets up logging only for its own namespace, so this logger is a child of it.
_log = logging.getLogger("vllm.plugins.pawl_cpu_lora")


class UnsupportedVLLMError(RuntimeError):
    """A vLLM function that the plugin replaces is missing, or has other parameters."""

    def __init__(self, vllm_version: str, difference: str) -> None:
        super().__init__(
            f"pawl-cpu-lora supports vLLM {SUPPORTED_VLLM}, this is {vllm_version}: {difference}."
            " Its stock CPU LoRA operations answer base-model requests with an adapter;"
            " install the supported version, or set VLLM_PLUGINS without pawl_cpu_lora"
            " to serve with its stock operations anyway."
        )
        self.vllm_version = vllm_version
        self.difference = difference


def install() -> None:
    """Replace the operations in this process; entry point `vllm.general_plugins`.

    vLLM calls this function in every process it starts, and may call it more than once.
    vLLM is imported here, not above: a plugin that fails to import is only
    logged and dropped, but an error of this function ends vLLM.
    """
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        _log.info("pawl-cpu-lora: not a CPU platform, nothing replaced")
        return
    version = str(vllm.__version__)
    of_experts = [(_import_module(name, version), own) for name, own in OF_EXPERTS.items()]
    modules = [_import_module(name, version) for name in PATCHED_MODULES]
    for module, replacements in of_experts:
        replace_operations([module], version, replacements)
    if replace_operations(modules, version):
        _log.info("pawl-cpu-lora: replaced vLLM's CPU LoRA operations")


def replace_operations(
    modules: Iterable[ModuleType],
    vllm_version: str,
    replacements: Mapping[str, Callable[..., Any]] = REPLACEMENTS,
) -> bool:
    """Set every replacement in every module; return False if all were set already.

    Everything is checked before anything changes: a half-replaced set would
    serve wrong answers.

    Raises:
        UnsupportedVLLMError: a function is missing, or has other parameters.
    """
    pending = [
        (module, name)
        for module in modules
        for name, replacement in replacements.items()
        if _needs_replacing(module, name, replacement, vllm_version)
    ]
    for module, name in pending:
        setattr(module, name, replacements[name])
    return bool(pending)


def _needs_replacing(
    module: ModuleType, name: str, replacement: Callable[..., Any], vllm_version: str
) -> bool:
    stock = getattr(module, name, None)
    if stock is replacement:
        return False
    if not callable(stock):
        raise UnsupportedVLLMError(vllm_version, f"{module.__name__} has no {name}")
    expected, actual = _parameters(replacement), _parameters(stock)
    if actual != expected:
        difference = f"{module.__name__}.{name} takes {actual}, not {expected}"
        raise UnsupportedVLLMError(vllm_version, difference)
    return True


def _parameters(function: Callable[..., object]) -> str:
    """Return a function's parameters and their defaults as text, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))


def _import_module(name: str, vllm_version: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UnsupportedVLLMError(vllm_version, f"no module {error.name}") from error
