"""Replace layers of a model in training by lighter ones that compute the same.

PEFT computes base and adapter as five operations, each of which keeps tensors for autograd. Here
they are one operation, without the gradient of a frozen weight, without a copy of the input, and
with the adapter in the model's precision. On a CPU in float32 it uses oneDNN's kernels, which torch
otherwise reserves for half precision: on processors with AVX-512 that are not Intel's, they are
more than twice as fast as MKL's.

For experts, PEFT adds the adapter to all experts' weights at every pass, in the weights' precision.
Here each token is multiplied by the two small matrices of its expert, as in a model server.

Replaced are PEFT's linear layers and stacked experts with one plain adapter, root-mean-square
norms, and gated units. A module that computes something else keeps its own forward pass, and a
replaced layer falls back to it while its adapter is switched off or merged, or its base is trained.

Weights that bitsandbytes packed are unpacked for each product, and never kept. bitsandbytes' own
8-bit products would also round the inputs, depending on the rest of the batch, and keep them in
spite of gradient checkpointing.
"""

from copy import deepcopy
from functools import cache
from types import MethodType
from typing import Any, Final

import torch
from peft.tuners.lora import Linear, ParamWrapper
from peft.utils.integrations import dequantize_bnb_weight
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers.integrations.moe import _grouped_mm

# torch's setting of how float32 products are computed on a CPU; None if it has no such setting.
_MATMUL: Any = getattr(torch.backends.mkldnn, "matmul", None)
# Linear layers whose weights bitsandbytes packed into 4 or 8 bits.
PACKED: Final = frozenset({"Linear4bit", "Linear8bitLt"})
# Random weights repeat after so many, a prime: it takes seconds to draw all those of a large layer.
RANDOM_NUMBERS: Final = 65_537


def make_base_lean(base: nn.Module, like: nn.Module | None = None) -> None:
    """Replace the forward passes of norms, gated units and packed layers of `base`, in place.

    Each replacement is first compared with a module of `like`, a model of the same classes. Without
    `like`, the modules of `base` serve, whose weights must be neither packed nor sharded.
    """
    same: dict[type, Any] = {}
    for module in (like or base).modules():
        if type(module) not in same and (_is_norm(module) or _is_gated(module)):
            forward = _norm_forward if _is_norm(module) else _gated_forward
            same[type(module)] = forward if _outputs_agree(module, forward) else None
    for module in base.modules():
        lean = _packed_forward if is_packed(module) else same.get(type(module))
        if lean is not None:
            module.forward = MethodType(lean, module)


def make_adapter_lean(model: nn.Module) -> None:
    """Replace the forward passes of the adapted layers of `model`, in place."""
    for module in model.modules():
        if type(module) is Linear and _is_plain(module):
            module.forward = MethodType(_lora_forward, module)
        # If wrappers are nested, the inner one, too: it is called while both adapters are off.
        if isinstance(module, ParamWrapper) and hasattr(module.get_base_layer(), "_apply_gate"):
            module.forward = MethodType(_experts_forward, module)


def is_packed(layer: nn.Module) -> bool:
    """Return whether bitsandbytes packed the weights of a linear layer."""
    return isinstance(layer, nn.Linear) and type(layer).__name__ in PACKED


def _weight_of(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the weights of a linear layer, (M, K); packed weights are unpacked into `dtype`."""
    weight: Tensor = layer.weight
    if is_packed(layer):
        weight = dequantize_bnb_weight(layer.weight, getattr(layer, "state", None)).to(dtype)
    return weight


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
    """Return whether `forward` computes the same as the module's own forward pass.

    Both are compared on a copy with random weights. They differ for some models' norms and units.
    """
    module = deepcopy(module).to_empty(device="cpu")
    some = 0.02 * torch.randn(RANDOM_NUMBERS)
    for parameter in module.parameters():
        for part in parameter.view(-1).split(RANDOM_NUMBERS):
            part.copy_(some[: len(part)])
    weight = module.weight if _is_norm(module) else module.gate_proj.weight
    x = torch.linspace(-3, 3, weight.shape[-1], dtype=weight.dtype)[None]
    own, ours = module(x), forward(module, x)
    if own.shape != ours.shape:
        return False
    limit = 1e-3 if weight.dtype.itemsize > 2 else 3e-2
    return float((own - ours).abs().max()) <= limit * float(own.abs().max())


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    if self.weight.requires_grad and torch.is_grad_enabled():
        own: Tensor = type(self).forward(self, hidden_states)
        return own
    if hidden_states.is_cuda:
        return nn.functional.rms_norm(
            hidden_states, self.weight.shape, self.weight, self.variance_epsilon
        )
    normed: Tensor = RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)
    return normed


def _gated_forward(self: Any, x: Tensor) -> Tensor:
    down: Tensor = self.down_proj(SwiGlu.apply(self.gate_proj(x), self.up_proj(x)))
    return down


def _is_plain(module: Any) -> bool:
    """Return whether the module computes x·Wᵀ + b + scale·(x·Aᵀ)·Bᵀ and nothing else."""
    (name,) = module.lora_A if len(module.lora_A) == 1 else (None,)
    return (
        name is not None
        and name not in module.lora_variant
        and not module.lora_bias[name]
        and not module.fan_in_fan_out
        and isinstance(module.lora_dropout[name], nn.Identity)
        and (type(module.get_base_layer()) is nn.Linear or is_packed(module.get_base_layer()))
    )


def _lora_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    base = self.get_base_layer()
    if self.disable_adapters or self.merged or kwargs or base.weight.requires_grad:
        own: Tensor = type(self).forward(self, x, *args, **kwargs)
        return own
    (name,) = self.lora_A
    flat = LoraProduct.apply(
        x.flatten(0, -2),
        base,
        self.lora_A[name].weight,
        self.lora_B[name].weight,
        self.scaling[name],
    )
    shaped: Tensor = flat.unflatten(0, x.shape[:-1])
    return shaped


def _experts_forward(self: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute experts with LoRA, otherwise as transformers' `grouped_mm_experts_forward` does.

    Shapes: tokens x (N, K); `chosen` (N, k), the experts of each token, and their `weights` (N, k).
    """
    wrappers, experts = {}, self
    while isinstance(experts, ParamWrapper):
        wrappers[experts.parameter_name] = experts
        experts = experts.base_layer
    if self.disable_adapters or self.merged:
        own: Tensor = type(self).forward(self, x, chosen, weights)
        return own
    expert_of, order = chosen.flatten().sort()
    ends = torch.searchsorted(
        expert_of, torch.arange(experts.num_experts, device=x.device), right=True
    )

    def multiply(rows: Tensor, name: str) -> Tensor:
        weight, bias = getattr(experts, name), getattr(experts, f"{name}_bias", None)
        own = grouped_product(rows, weight if experts.is_transposed else weight.mT, ends)
        if bias is not None:
            own = own + bias[expert_of]
        if (wrapper := wrappers.get(name)) is None:
            return own
        (adapter,) = wrapper.lora_A
        a, b = (side[adapter].weight.to(x.dtype) for side in (wrapper.lora_A, wrapper.lora_B))
        a = a.unflatten(0, (experts.num_experts, -1))
        b = b.unflatten(1, (-1, experts.num_experts)).permute(2, 1, 0) * wrapper.scaling[adapter]
        # Grouped products need rows of a multiple of 16 bytes.
        a, b = (
            nn.functional.pad(side, (0, 0, 0, -side.shape[1] % 8)).contiguous() for side in (a, b)
        )
        return own + grouped_product(grouped_product(rows, a.mT, ends), b, ends)

    gated = experts._apply_gate(multiply(x[order // chosen.shape[1]], "gate_up_proj"))
    weighed = multiply(gated, "down_proj") * weights.flatten()[order, None]
    out: Tensor = weighed[order.argsort()].unflatten(0, chosen.shape).sum(1)
    return out.to(x.dtype)


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by its group's matrix; rows are sorted by group, and groups end at `ends`.

    Shapes: rows (S, K), weight (E, K, M), ends (E,).
    """
    if rows.dtype == torch.float64:
        out: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
    else:
        out = _grouped_mm(rows, weight, ends.int())
    return out


def _packed_forward(self: Any, x: Tensor) -> Tensor:
    flat = PackedProduct.apply(x.flatten(0, -2), self)
    shaped: Tensor = flat.unflatten(0, x.shape[:-1])
    return shaped


class OneDnnProducts:
    """Context that computes float32 products on a CPU with oneDNN, if that is exact there.

    torch passes float32 products to oneDNN only if rounding operands to bfloat16 is allowed.
    oneDNN rounds them only on processors with matrix tiles (AMX); there MKL is kept.
    """

    def __enter__(self) -> None:
        if _onednn_is_exact():
            self._before = _MATMUL.fp32_precision
            _MATMUL.fp32_precision = "bf16"

    def __exit__(self, *_: object) -> None:
        if _onednn_is_exact():
            _MATMUL.fp32_precision = self._before


@cache
def _onednn_is_exact() -> bool:
    """Return whether oneDNN's products keep float32's precision on this processor.

    It multiplies one by 1 + 2⁻²⁰, which bfloat16 cannot represent.
    """
    if _MATMUL is None or not torch.backends.mkldnn.is_available():
        return False
    odd = torch.full((256, 256), 1 + 2**-20)
    before = _MATMUL.fp32_precision
    _MATMUL.fp32_precision = "bf16"
    try:
        return bool((odd @ torch.eye(256) == odd).all())
    finally:
        _MATMUL.fp32_precision = before


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left · right for two matrices, or for two batches of matrices."""
    multiply = torch.bmm if left.ndim == 3 else torch.mm
    with OneDnnProducts():
        return multiply(left, right)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left · right to `total`, in place."""
    with OneDnnProducts():
        total.addmm_(left, right)


class LoraProduct(Function):
    """Compute a layer with LoRA (arXiv:2106.09685 §4.1): x·Wᵀ + b + scale·(x·Aᵀ)·Bᵀ.

    Shapes: x (N, K), W (M, K), b (M,), A (r, K), B (M, r). `layer` has W and b, which are frozen.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return the layer's output, (N, M)."""
        down = product(x, a.to(x.dtype).T)
        y = product(x, _weight_of(layer, x.dtype).T)
        add_product(y, down, b.to(x.dtype).T * scale)
        if layer.bias is not None:
            y += layer.bias
        ctx.save_for_backward(x, down, a, b)
        ctx.layer, ctx.scale = layer, scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, A and B."""
        x, down, a, b = ctx.saved_tensors
        d_down = product(dy, b.to(dy.dtype) * ctx.scale)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = product(dy, _weight_of(ctx.layer, dy.dtype))
            add_product(dx, d_down, a.to(dy.dtype))
        da = product(d_down.T, x).to(a.dtype)
        db = product(down.T, dy).T.mul(ctx.scale).to(b.dtype)
        return dx, None, da, db, None


class PackedProduct(Function):
    """Compute x·Wᵀ + b with the packed, frozen weights W and the bias b of a `layer`.

    Shapes: x (N, K), W (M, K), b (M,).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        """Return the layer's output, (N, M)."""
        ctx.layer = layer
        y = product(x, _weight_of(layer, x.dtype).T)
        return y if layer.bias is None else y + layer.bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x."""
        return product(dy, _weight_of(ctx.layer, dy.dtype)), None


class RmsNorm(Function):
    """Compute w·x / sqrt(mean(x²) + eps) over the last dimension, w frozen (arXiv:1910.07467)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, inverse, weight)
        normed: Tensor = weight * (wide * inverse).to(x.dtype)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x."""
        x, inverse, weight = ctx.saved_tensors
        wide = x.float()
        scaled = (dy * weight).float()
        along = torch.linalg.vecdot(scaled, wide)[..., None]
        share = along.mul_(inverse.pow(3)).div_(x.shape[-1])
        dx = scaled.mul_(inverse).addcmul_(wide, share, value=-1.0)
        return dx.to(x.dtype), None, None


class SwiGlu(Function):
    """Compute silu(gate) · up (SwiGLU, arXiv:2002.05202)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of gate and up; the activations are computed again."""
        gate, up = ctx.saved_tensors
        d_gate = torch.ops.aten.silu_backward(dy * up, gate)
        return d_gate, torch.nn.functional.silu(gate).mul_(dy)
