"""Compute the KL divergence of two policies' next tokens, exactly: over the whole vocabulary.

KL(π ‖ ρ) = Σ π(token) · (log π(token) − log ρ(token)). The LM head runs over chunks of places, as
in `trainer.learners.kernels.head`, and no logits outlive their chunk. All of it is in float32 at
least, and carries no gradient.
"""

import torch
from torch import Tensor

from trainer.learners.kernels.head import CHUNK, wide_product


def head_kl(own: Tensor, other: Tensor, head: Tensor) -> Tensor:
    """Return KL(own ‖ other), (M,) in nats, after hidden states (M, H) under one head (V, H)."""
    # Both policies' logits are there at once.
    size = max(1, CHUNK[own.device.type] // (2 * len(head)))
    chunks = zip(own.split(size), other.split(size), strict=True)
    parts = [
        logits_kl(wide_product(one, head), wide_product(another, head)) for one, another in chunks
    ]
    return torch.cat(parts)


def logits_kl(own: Tensor, other: Tensor) -> Tensor:
    """Return KL(own ‖ other), (M,) in nats, of the softmax of logits (M, V)."""
    wide = torch.promote_types(own.dtype, torch.float32)
    here, there = torch.log_softmax(own.to(wide), -1), torch.log_softmax(other.to(wide), -1)
    difference = there.neg_().add_(here)
    # What rounding leaves below zero is zero.
    divergence: Tensor = torch.linalg.vecdot(here.exp_(), difference)
    return divergence.clamp_(min=0.0)
