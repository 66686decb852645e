"""List the places between two steps of an update, and die at one of them.

What is patched is the trainer's own process, before it starts: the product knows nothing of
it. A boundary that a life does not come by (a release, where there is nothing to release)
does nothing.
"""

import inspect
import os
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final

from torch.optim.optimizer import register_optimizer_step_post_hook

import trainer.learners.learner
from store import files, version_states
from store.updates import claims
from trainer.learners.learner import Learner
from trainer.loop import Loop
from trainer.publishing import adapters
from trainer.publishing.model_server import ModelServer
from trainer.publishing.publisher import Publisher
from trainer.updates.planning import Planning

Patch = Callable[[], None]


def die() -> None:
    """Die by `kill -9`, from within: at exactly this instruction."""
    os.kill(os.getpid(), signal.SIGKILL)


def _before(target: Any, name: str, time: int = 1) -> Patch:
    return _dying(target, name, time, after=False)


def _after(target: Any, name: str, time: int = 1) -> Patch:
    return _dying(target, name, time, after=True)


def _dying(target: Any, name: str, time: int, *, after: bool) -> Patch:
    # Looked up now: a name that the trainer no longer has is an error before any life begins.
    real = getattr(target, name)
    return lambda: _wrap(target, name, real, time, after=after)


def _wrap(target: Any, name: str, real: Any, time: int, *, after: bool) -> None:
    """Die before or after `target.name` did its work for the `time`-th time."""
    left = [time]

    def at(is_after: bool) -> None:
        if is_after == after:
            left[0] -= 1
            if not left[0]:
                die()

    @wraps(real)
    async def asynchronous(*args: Any, **kwargs: Any) -> Any:
        at(False)
        found = await real(*args, **kwargs)
        at(True)
        return found

    @wraps(real)
    def synchronous(*args: Any, **kwargs: Any) -> Any:
        at(False)
        found = real(*args, **kwargs)
        at(True)
        return found

    is_async = inspect.iscoroutinefunction(real)
    setattr(target, name, asynchronous if is_async else synchronous)


def _between_steps() -> None:
    register_optimizer_step_post_hook(lambda *_: die())


# In the order of an update. `claims` and `policies` have open transactions "after" a call.
BOUNDARIES: Final[dict[str, Patch]] = {
    "before recovery": _before(Loop, "recover"),
    "before a release": _before(claims, "release"),
    "in the transaction of a release": _after(claims, "release"),
    "after recovery": _after(Loop, "recover"),
    "before the claim": _before(claims, "claim"),
    "in the transaction of the claim": _after(claims, "claim"),
    "after the claim": _before(Planning, "plan"),
    "before training": _before(Learner, "update"),
    "between optimiser steps": _between_steps,
    "after training": _after(Learner, "update"),
    "before saving": _before(Learner, "save"),
    "between adapter and optimiser": _before(trainer.learners.learner, "save_state"),
    "after saving": _after(Learner, "save"),
    "between syncs": _after(files, "sync", 3),
    "before the rename": _before(Path, "rename"),
    "after the rename": _after(Path, "rename"),
    "before the record": _before(claims, "consume"),
    "in the transaction of the record": _after(claims, "consume"),
    "after the record": _before(Publisher, "publish"),
    "before the load": _before(ModelServer, "load"),
    "after the load": _after(ModelServer, "load"),
    "after the probe": _before(version_states, "promote"),
    "in the transaction of the promotion": _after(version_states, "promote"),
    "after the promotion": _after(Publisher, "publish"),
    "before the sweep": _before(adapters, "sweep", 2),
    "after the sweep": _after(adapters, "sweep", 2),
}
