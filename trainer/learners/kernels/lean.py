"""Install lighter forward passes on modules of the model in training.

They replace what `trainer.learners.kernels.products` can compute identically: PEFT's linear layers
with one plain adapter, root-mean-square norms, and gated units. A module that is not as
expected keeps its own forward pass, and one whose state changes (an adapter switched off or
merged, a trained base) falls back to it.
"""

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

from trainer.learners.kernels.products import LoraProduct, RmsNorm, SwiGlu


def make_base_lean(base: nn.Module) -> None:
    """Replace the forward passes of norms and gated units of `base`, in place."""
    same: dict[type, bool] = {}
    for module in base.modules():
        forward = _norm_forward if _is_norm(module) else _gated_forward
        if _is_norm(module) or _is_gated(module):
            if type(module) not in same:
                same[type(module)] = _outputs_agree(module, forward)
            if same[type(module)]:
                module.forward = MethodType(forward, module)


def make_adapter_lean(model: nn.Module) -> None:
    """Replace the forward passes of the adapted linear layers of `model`, in place."""
    for module in model.modules():
        if type(module) is Linear and _is_plain(module):
            module.forward = MethodType(_lora_forward, module)


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _is_gated(module: Any) -> bool:
    names = {name for name, child in module.named_children() if isinstance(child, nn.Linear)}
    if names != {"gate_proj", "up_proj", "down_proj"} or not hasattr(module, "act_fn"):
        return False
    x = torch.linspace(-3, 3, 7)
    return torch.allclose(module.act_fn(x), nn.functional.silu(x))


@torch.no_grad()
def _outputs_agree(module: Any, forward: Any) -> bool:
    """Return True if `forward` computes what the module does; some norms and units differ."""
    weight = module.weight if _is_norm(module) else module.gate_proj.weight
    x = torch.linspace(-3, 3, weight.shape[-1], dtype=weight.dtype, device=weight.device)[None]
    own, ours = module(x), forward(module, x)
    if own.shape != ours.shape:
        return False
    limit = 1e-3 if weight.dtype.itemsize > 2 else 3e-2
    return float((own - ours).abs().max()) <= limit * float(own.abs().max())


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    if self.weight.requires_grad and torch.is_grad_enabled():
        own: Tensor = type(self).forward(self, hidden_states)
        return own
    normed: Tensor = RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)
    return normed


def _gated_forward(self: Any, x: Tensor) -> Tensor:
    down: Tensor = self.down_proj(SwiGlu.apply(self.gate_proj(x), self.up_proj(x)))
    return down


def _is_plain(module: Any) -> bool:
    """Return True if the module is y = x·Wᵀ + b + scale·(x·Aᵀ)·Bᵀ and nothing else."""
    (name,) = module.lora_A if len(module.lora_A) == 1 else (None,)
    return (
        name is not None
        and name not in module.lora_variant
        and not module.lora_bias[name]
        and not module.fan_in_fan_out
        and isinstance(module.lora_dropout[name], nn.Identity)
        and type(module.get_base_layer()) is nn.Linear
    )


def _lora_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    base = self.get_base_layer()
    if self.disable_adapters or self.merged or kwargs or base.weight.requires_grad:
        own: Tensor = type(self).forward(self, x, *args, **kwargs)
        return own
    (name,) = self.lora_A
    flat = LoraProduct.apply(
        x.flatten(0, -2),
        base.weight,
        base.bias,
        self.lora_A[name].weight,
        self.lora_B[name].weight,
        self.scaling[name],
    )
    shaped: Tensor = flat.unflatten(0, x.shape[:-1])
    return shaped
