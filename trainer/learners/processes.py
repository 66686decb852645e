"""The processes of one learner: `accelerate launch` starts them, rank 0 leads.

The frozen base is sharded over them (FSDP2, arXiv:2304.11277), a decoder layer at a time;
the adapter, small beside it, is whole in each. Each process computes its share of a step's
micro-batches and the adapter's gradients are added up, so that all take the same step.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

T = TypeVar("T")

# A follower waits for its leader for as long as no episodes come.
COMMAND_TIMEOUT = timedelta(days=3650)


class Processes:
    """What they say to each other. One process says nothing."""

    def __init__(self) -> None:
        self.count = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        # Commands go over the network of the hosts, whatever the gradients go over.
        self._command_group = (
            dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT) if self.count > 1 else None
        )

    def broadcast(self, what: T) -> T:
        """What rank 0 has of `what`, in every process."""
        if self.count == 1:
            return what
        said = [what]
        dist.broadcast_object_list(said, src=0, group=self._command_group)
        return said[0]

    def gather(self, what: T) -> list[T]:
        """Everybody's `what`, in every process, by rank."""
        if self.count == 1:
            return [what]
        said: list[Any] = [None] * self.count
        dist.all_gather_object(said, what, group=self._command_group)
        return said

    def add_up(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make every gradient the sum of everybody's."""
        if self.count == 1:
            return
        trained = list(parameters)
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in trained if parameter.grad is not None]
        flat = torch.cat([grad.flatten().float() for grad in grads])
        dist.all_reduce(flat)
        start = 0
        for grad in grads:
            grad.copy_(flat[start : start + grad.numel()].view_as(grad))
            start += grad.numel()

    def shard(self, base: Any) -> None:
        """Spread the decoder layers of `base`, frozen, over the processes, in place."""
        if self.count == 1:
            return
        device = next(base.parameters()).device.type
        mesh = init_device_mesh(device, (self.count,))
        for layer in base.get_decoder().layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
