"""Matrix products for frozen weights with an adapter, each with a backward of its own.

PEFT computes base and adapter as five operations and keeps what autograd asks of each. Here
they are one: no gradient of a frozen weight, no copy of an input, the adapter in the model's
precision, and on a CPU in float32 oneDNN's kernels, which torch otherwise keeps for half
precision: with AVX-512 on processors that are not Intel's they are more than twice as fast
as MKL's.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def times_transposed(left: Tensor, right: Tensor) -> Tensor:
    """left · rightᵀ, shapes (N, K) and (M, K)."""
    if _ONEDNN and left.dtype == torch.float32 and left.device.type == "cpu":
        product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
        return product
    return left @ right.T


def batch_times_transposed(left: Tensor, right: Tensor) -> Tensor:
    """left · rightᵀ for each of a batch, shapes (G, N, K) and (G, M, K)."""
    if _ONEDNN and left.dtype == torch.float32 and left.device.type == "cpu":
        return torch.stack([times_transposed(*pair) for pair in zip(left, right, strict=True)])
    return torch.bmm(left, right.transpose(1, 2))


class LoraProduct(Function):
    """x·Wᵀ + b + scale·(x·Aᵀ)·Bᵀ for x (N, K), W (M, K), A (r, K), B (M, r); W, b are frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        down = times_transposed(x, a.to(x.dtype))
        y = times_transposed(x, weight)
        y.add_(times_transposed(down, b.to(x.dtype)), alpha=scale)
        if bias is not None:
            y += bias
        ctx.save_for_backward(x, down, weight, a, b)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, down, weight, a, b = ctx.saved_tensors
        d_down = times_transposed(dy, b.to(dy.dtype).T).mul_(ctx.scale)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = times_transposed(dy, weight.T)
            dx += times_transposed(d_down, a.to(dy.dtype).T)
        da = times_transposed(d_down.T.contiguous(), x.T).to(a.dtype)
        db = times_transposed(down.T.contiguous(), dy.T).T.mul(ctx.scale).to(b.dtype)
        return dx, None, None, da, db, None


class RmsNorm(Function):
    """w · x / sqrt(mean(x²) + eps) over the last dimension; w is frozen."""

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
        x, inverse, weight = ctx.saved_tensors
        wide = x.float()
        scaled = (dy * weight).float()
        along = torch.linalg.vecdot(scaled, wide)[..., None]
        share = along.mul_(inverse.pow(3)).div_(x.shape[-1])
        dx = scaled.mul_(inverse).addcmul_(wide, share, value=-1.0)
        return dx.to(x.dtype), None, None


class SwiGlu(Function):
    """silu(gate) · up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate = torch.ops.aten.silu_backward(dy * up, gate)
        return d_gate, torch.nn.functional.silu(gate).mul_(dy)
