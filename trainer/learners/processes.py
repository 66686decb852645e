"""Compute in several processes, each on its own GPU, with the result of a single process.

The frozen base is sharded over them, one decoder layer at a time (`fully_shard`, the second
version of PyTorch FSDP, arXiv:2304.11277), while it is read: no process ever has all of it. Each
process has the whole adapter, which is small. It computes a share of a step's micro-batches, and
the gradients of the adapter are summed over the processes, so that all take the same step.

A process that fails must not leave the others waiting for it. So all processes meet before each
collective operation, and a failed process reports its failure there. Then all abandon the
computation, and continue together where micro-batches are cut anew (`budget.TokenBudget`), or at
the command's end (`distributed.check_all_succeeded`).
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from transformers import core_model_loading as loading

from trainer.errors import CompanionFailed
from trainer.learners.scoring import layers_of

T = TypeVar("T")

# The state that a process brings to a meeting, where all processes learn the worst one.
FINE, NO_MEMORY, FAILED = range(3)
# A follower waits for its leader for as long as there is nothing to train on.
COMMAND_TIMEOUT = timedelta(days=3650)
# The environment variable that makes transformers read a model's weights one by one.
NO_ASYNC_LOAD: Final = "HF_DEACTIVATE_ASYNC_LOAD"


class Processes:
    """Communication between the processes of one learner; does nothing in a single process."""

    def __init__(self) -> None:
        """Read rank and number of processes from torch's process group, if there is one."""
        self.count = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        # Commands use gloo, over the hosts' network, whatever backend the gradients use.
        self._command_group = (
            dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT) if self.count > 1 else None
        )
        self._sharded: list[Any] = []

    def close(self) -> None:
        """End the connections: a process that exits with open connections may crash."""
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def meet(self, own_state: int = FINE) -> None:
        """Wait for all processes, and exchange states; `own_state` is the state of this process.

        Processes meet before every collective operation. A process that failed meets the others
        instead of taking part in it.

        Raises:
            CompanionFailed: another process's state is worse than `own_state`.
        """
        if self.count == 1:
            return
        worst = torch.tensor(own_state)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._command_group)
        if int(worst) > own_state:
            raise CompanionFailed(is_memory=int(worst) == NO_MEMORY)

    def regroup(self, own_error: Exception | None) -> None:
        """Wait until all processes have ended a joint computation.

        `own_error` is this process's error, or None. If there is one, processes that still compute
        abandon the computation at their next meeting.
        """
        if not isinstance(own_error, CompanionFailed):
            with suppress(CompanionFailed):
                self.meet(FINE if own_error is None else FAILED)
        if own_error is not None:
            self.recover()

    def recover(self) -> None:
        """Make the sharded layers ready to compute again, after a computation was abandoned."""
        for layer in self._sharded:
            layer.reset_iter_state()

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` in every process."""
        if self.count == 1:
            return value
        self.meet()
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._command_group)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every process, by rank, in every process."""
        if self.count == 1:
            return [value]
        self.meet()
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._command_group)
        return values

    def sum_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replace every gradient by its sum over all processes."""
        if self.count == 1:
            return
        trained = list(parameters)
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in trained if parameter.grad is not None]
        flat = torch.cat([grad.flatten().float() for grad in grads])
        self.meet()
        dist.all_reduce(flat)
        start = 0
        for grad in grads:
            grad.copy_(flat[start : start + grad.numel()].view_as(grad))
            start += grad.numel()

    @contextmanager
    def sharding(self) -> Iterator[None]:
        """Shard the decoder layers of a frozen model that transformers loads within the block.

        Each layer is sharded over the processes as soon as its last weight has been read.
        """
        if self.count == 1:
            yield
            return
        mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (self.count,))
        set_parameter, own_threads = loading.set_param_for_module, os.environ.get(NO_ASYNC_LOAD)
        waiting: list[tuple[str, Any]] | None = None

        def set_and_shard(model: Any, name: str, *more: Any) -> None:
            nonlocal waiting
            set_parameter(model, name, *more)
            if waiting is None:
                layers = set(layers_of(model))
                waiting = [(f"{path}.", m) for path, m in model.named_modules() if m in layers]
            for path, layer in waiting:
                if name.startswith(path) and not any(p.is_meta for p in layer.parameters()):
                    self._shard(layer, mesh)
                    waiting.remove((path, layer))
                    break

        loading.set_param_for_module = set_and_shard
        # Other threads would read the whole model before the first layer is sharded.
        os.environ[NO_ASYNC_LOAD] = "1"
        try:
            yield
        finally:
            loading.set_param_for_module = set_parameter
            os.environ.pop(NO_ASYNC_LOAD)
            if own_threads is not None:
                os.environ[NO_ASYNC_LOAD] = own_threads

    def _shard(self, layer: Any, mesh: DeviceMesh) -> None:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        for parameter in layer.parameters():
            # Otherwise transformers would initialise it as a weight that it has not read.
            parameter._is_hf_initialized = True
        layer.set_custom_all_gather(_MeetFirst(self))
        self._sharded.append(layer)


class _MeetFirst(DefaultAllGather):
    """Gather the parts of a sharded layer, after a meeting of all processes."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._processes.meet()
        return super().__call__(*arguments, **options)
