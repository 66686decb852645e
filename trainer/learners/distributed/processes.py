"""Connect the processes of one learner, which `accelerate launch` starts; rank 0 leads.

The frozen base is sharded over them, one decoder layer at a time (`fully_shard`, the second
version of PyTorch FSDP, arXiv:2304.11277); the adapter, which is small, is whole in each.
Each process computes its share of a step's micro-batches, and the adapter's gradients are
summed, so that all take the same step.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

T = TypeVar("T")

# A follower waits for its leader for as long as there is nothing to train on.
COMMAND_TIMEOUT = timedelta(days=3650)


class Processes:
    """Communicate between the processes of one learner; a single one communicates nothing."""

    def __init__(self) -> None:
        """Read rank and number of processes from torch's process group, if there is one."""
        self.count = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        # Commands use gloo, over the hosts' network, whatever backend the gradients use.
        self._command_group = (
            dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT) if self.count > 1 else None
        )

    def close(self) -> None:
        """End the connections: a process that exits with open ones may abort instead."""
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` in every process."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._command_group)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every process, by rank, in every process."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._command_group)
        return values

    def add_up(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replace every gradient by its sum over all processes."""
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
        """Shard the decoder layers of `base`, which is frozen, over the processes, in place."""
        if self.count == 1:
            return
        device = next(base.parameters()).device.type
        mesh = init_device_mesh(device, (self.count,))
        for layer in base.get_decoder().layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
