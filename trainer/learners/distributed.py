"""Run one learner in several processes, which `accelerate launch` starts; rank 0 leads.

Rank 0 receives each command (a call of a learner's method) and passes it on to the others. After a
command, all processes learn whether it failed in any of them. (`trainer.learners.processes` has the
joint computation.) Learners that share a base model share its processes, so a command names its
policy.
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog
from accelerate.commands import launch as accelerate_launch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trainer.errors import (
    MEMORY_REMEDY,
    CompanionFailed,
    LearnerError,
    ShortOfMemory,
    TrainerError,
)
from trainer.learners.budget import is_out_of_memory
from trainer.learners.processes import Processes

if TYPE_CHECKING:
    from trainer.learners.learner import Learner

log = structlog.get_logger()

T = TypeVar("T")


def launch(processes: int, module: str, arguments: Sequence[str]) -> int:
    """Run a module in several processes of this machine, and return an exit status.

    The status is 0 if all succeeded or a signal ended them, 2 if one ended with 2 (which has said
    why), and 1 after other failures: then the caller may start the processes again.
    """
    command = ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1"]
    # Port 0 stands for any free port.
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    sys.argv = ["accelerate-launch", *command, "-m", module, *arguments]
    try:
        accelerate_launch.main()
    except SignalException:
        return 0
    except ChildFailedError as error:
        return 2 if any(failure.exitcode == 2 for failure in error.failures.values()) else 1
    return 0


def is_follower() -> bool:
    """Return whether this process runs the commands of rank 0 (its own rank is not 0)."""
    return int(os.environ.get("RANK", "0")) > 0


def has_several_processes() -> bool:
    """Return whether the learner runs in several processes (this is one of them)."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


class _LeadingLearner:
    """The learner of rank 0, whose method calls run in all processes at once.

    It implements `trainer.learners.protocol.LearnerProtocol` and returns the results of rank 0.
    Methods that do not compute with the weights run in rank 0 only.
    """

    def __init__(self, policy: str, learner: "Learner", one_at_a_time: threading.Lock) -> None:
        """Lead the other processes, if any, that run the `learner` of a policy."""
        self._policy = policy
        self._learner = learner
        self._lock = one_at_a_time
        self.interrupt = learner.interrupt
        self.why_another_base = learner.why_another_base
        self.why_unreplayable = learner.why_unreplayable
        self.reply_ids = learner.reply_ids
        self.probe_rows = learner.probe_rows
        self.vocabulary_probe = learner.vocabulary_probe
        self.policy_logprobs = learner.policy_logprobs
        self.restore = partial(self._run_everywhere, learner.restore)
        self.update = partial(self._run_everywhere, learner.update)
        self.version_logprobs = partial(self._run_everywhere, learner.version_logprobs)
        self.logprobs = partial(self._run_everywhere, learner.logprobs)
        self.set_served_context = partial(self._run_everywhere, learner.set_served_context)
        self.layer_kinds = partial(self._run_everywhere, learner.layer_kinds)
        self.halve_micro_batches = partial(self._run_everywhere, learner.halve_micro_batches)
        self.leave_out_kinds = partial(self._run_everywhere, learner.leave_out_kinds)
        self.write_test_adapter = partial(self._run_everywhere, learner.write_test_adapter)
        self.rehearse = partial(self._run_everywhere, learner.rehearse)
        self.save = partial(self._run_everywhere, learner.save)
        self.mark_saved = partial(self._run_everywhere, learner.mark_saved)

    def _run_everywhere(self, command: Callable[..., T], *args: object) -> T:
        with self._lock:
            self._learner.processes.broadcast((self._policy, command.__name__, *args))
            try:
                result = _run_command(command, *args)
            except Exception as error:
                check_all_succeeded(self._learner, error)
                raise
            check_all_succeeded(self._learner, None)
            return result


def _run_command(command: Callable[..., T], *args: object) -> T:
    """Run one command in this process.

    Raises:
        ShortOfMemory: memory ran out in the command.
    """
    try:
        return command(*args)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        why = f"memory ran out ({command.__name__}): {MEMORY_REMEDY}: {error}"
        raise ShortOfMemory(why) from error


def check_all_succeeded(learner: "Learner", own_error: Exception | None) -> None:
    """Wait until a command has ended in all processes; `own_error` is the error in this one.

    If the command failed elsewhere only, this learner drops its model: the processes would go on
    with different weights. An `OSError` does not count, as a failed write changes no weights.

    Raises:
        LearnerError: the command failed in another process, and not in this one.
        ShortOfMemory: the same, if memory ran out there.
    """
    learner.processes.regroup(own_error)
    is_from_companion = isinstance(own_error, CompanionFailed)
    reported = None
    if not (own_error is None or is_from_companion or isinstance(own_error, OSError)):
        is_ours = isinstance(own_error, TrainerError)
        why = str(own_error) if is_ours else f"{type(own_error).__name__}: {own_error}"
        reported = (why, isinstance(own_error, ShortOfMemory))
    failures = [failure for failure in learner.processes.gather(reported) if failure is not None]
    if not failures or not (own_error is None or is_from_companion):
        return
    learner.forget_model()
    why, is_short = failures[0]
    kind = ShortOfMemory if is_short else LearnerError
    raise kind(f"another process failed: {why}")


class Leader:
    """Rank 0's side: it runs the learners of one base model in all processes."""

    def __init__(self, learners: "Mapping[str, Learner]") -> None:
        """Wrap the learners, by policy, so that their methods run in all processes."""
        # One command at a time: the processes' messages must not interleave.
        self._lock = threading.Lock()
        self._processes = next(iter(learners.values())).processes
        self.learners = {
            policy: _LeadingLearner(policy, learner, self._lock)
            for policy, learner in learners.items()
        }

    def interrupt(self) -> None:
        """Stop all learners for good: running and later updates raise `Interrupted`."""
        for learner in self.learners.values():
            learner.interrupt()

    def stop_followers(self) -> None:
        """Tell the other processes to end, once the current command is done."""
        with self._lock:
            self._processes.broadcast(None)
            self._processes.close()


def follow(learners: "Mapping[str, Learner]") -> None:
    """Run the commands of rank 0 in this process until rank 0 stops; `learners` are by policy.

    A command that fails in one process counts as failed in all; rank 0 raises the error. An error
    that is no `TrainerError` also ends this process.
    """
    processes: Processes = next(iter(learners.values())).processes
    while (command := processes.broadcast(None)) is not None:
        policy, name, *arguments = command
        failure: Exception | None = None
        try:
            _run_command(getattr(learners[policy], name), *arguments)
        except Exception as error:
            log.debug("follower_failed", policy=policy, method=name, reason=str(error))
            failure = error
        with suppress(LearnerError):
            check_all_succeeded(learners[policy], failure)
        if not (failure is None or isinstance(failure, TrainerError)):
            raise failure
    processes.close()
