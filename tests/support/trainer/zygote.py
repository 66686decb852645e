"""Start trainers, controllers and model servers in no time, as they are killed hundreds of times.

`python -m tests.support.trainer.zygote` imports everything once and forks: it reads a JSON line a
wish and answers with one. It has one thread, no event loop and no model; each child reads its
settings, loads its model and opens its connections by itself, and `kill -9` hits a process as real
as any.
A trainer may be told to die at a boundary between two steps of an update. What is patched for that
is the trainer's own process, before it starts: the product knows nothing of it.
"""

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pawl.processes import large_imports
from tests.support.trainer.scored_episodes import BASE, fill, write_model

# A process killed is gone in this time; one that is not is stuck in the kernel.
GONE_S: Final = 30.0
POLL_S: Final = 0.02
NEEDED: Final = (
    "tests.support.servers.computing_server",
    "pawl.cli",
    "controller.run",
    "trainer.run",
    "transformers.models.llama.modeling_llama",
)


class Zygote:
    """Ask for processes; threads may share it: none waits in the pipe for what another started."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._pipe = threading.Lock()
        # Where a trainer, and a controller, may be told to die.
        answer = self._answer()
        self.boundaries: list[str] = answer["trainer"]
        self.controllers_boundaries: list[str] = answer["controller"]

    def start(self, role: str, log: Path, env: Mapping[str, str], **arguments: Any) -> int:
        """Fork a process of that role, and return its id."""
        wish = {"role": role, "log": str(log), "env": dict(env), "arguments": arguments}
        return int(self._ask(wish)["pid"])

    def wait(self, pid: int, within_s: float) -> int | None:
        """Return how the process ended (negative: the signal); None if it lives on."""
        deadline = time.monotonic() + within_s
        while True:
            status: int | None = self._ask({"ended": pid})["status"]
            left_s = deadline - time.monotonic()
            if status is not None or left_s <= 0:
                return status
            time.sleep(min(POLL_S, left_s))

    def end(self, pid: int, by: signal.Signals) -> int | None:
        """Send a signal, and wait for the end."""
        os.kill(pid, by)
        return self.wait(pid, GONE_S)

    def stop(self, pid: int) -> int | None:
        """Ask a process to end; return its status, 0 also if it had no handler for that yet."""
        status = self.end(pid, signal.SIGTERM)
        return 0 if status == -signal.SIGTERM else status

    def _ask(self, wish: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with self._pipe:
            self._process.stdin.write(json.dumps(wish) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def zygote(log: Path) -> Iterator[Zygote]:
    """Run a zygote within the block; its children have one thread for sums."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PAWL_", "DATABASE_URL"))}
    env = kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "tests.support.trainer.zygote"]
    with (
        log.open("ab") as file,
        subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        ) as process,
    ):
        try:
            yield Zygote(process)
        finally:
            process.terminate()


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    # A child would copy the pages of all modules when it first looks for garbage in them.
    with large_imports():
        for name in NEEDED:
            import_module(name)
    names = {role: list(boundaries()) for role, boundaries in BOUNDARIES.items()}
    print(json.dumps(names), file=answers, flush=True)
    for line in sys.stdin:
        wish = json.loads(line)
        if "ended" in wish:
            pid, status = os.waitpid(wish["ended"], os.WNOHANG)
            answer = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            answer = {"pid": _fork(**wish)}
        print(json.dumps(answer), file=answers, flush=True)


def _fork(role: str, log: str, env: dict[str, str], arguments: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(file, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(env)
        os.chdir(Path(log).parent)
        ROLES[role](**arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _stage(model: str, database_urls: list[str], **arguments: Any) -> None:
    write_model(Path(model))
    asyncio.run(fill(database_urls, Path(model), **arguments))


def _serve(model: str, port: int, seen: str) -> None:
    from tests.support.servers.computing_server import serve

    serve(BASE, Path(model), port, Path(seen))


def _pawl(role: str, dies: str | None = None) -> None:
    """Run a trainer or a controller, as anyone starts it; it may die at a boundary."""
    from pawl.cli import main as pawl

    if dies is not None:
        BOUNDARIES[role]()[dies]()

    sys.argv = ["pawl", role]
    pawl()


ROLES: Final[Mapping[str, Callable[..., None]]] = {
    "stage": _stage,
    "server": _serve,
    "trainer": partial(_pawl, "trainer"),
    "controller": partial(_pawl, "controller"),
}
Patch = Callable[[], None]


def trainers_boundaries() -> dict[str, Patch]:
    """Return the places between two steps of an update, in their order, and how to die there.

    A boundary that a life does not come by (a release, where there is nothing to release) does
    nothing. `claims` has open transactions after a call.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook as after_step

    from store import claims, files
    from trainer.learners import learner
    from trainer.learners.learner import Learner
    from trainer.loop import Loop
    from trainer.publishing import adapters
    from trainer.updates.recording import Recording
    from trainer.updates.training import Training

    def between_steps() -> None:
        after_step(lambda *_: die())

    return {
        "before recovery": _before(Loop, "recover"),
        "before a release": _before(claims, "release"),
        "in the transaction of a release": _after(claims, "release"),
        "after recovery": _after(Loop, "recover"),
        "before the claim": _before(claims, "claim"),
        "in the transaction of the claim": _after(claims, "claim"),
        "after the claim": _before(Training, "plan"),
        "before training": _before(Learner, "update"),
        "between optimiser steps": between_steps,
        "after training": _after(Learner, "update"),
        "before saving": _before(Learner, "save"),
        "between adapter and optimiser": _before(learner, "save_state"),
        "after saving": _after(Learner, "save"),
        "between syncs": _after(files, "sync", 3),
        "before the rename": _before(Path, "rename"),
        "after the rename": _after(Path, "rename"),
        "before the record": _before(claims, "record_update"),
        "in the transaction of the record": _after(claims, "record_update"),
        "after the record": _after(Recording, "record_update"),
        "after the promotion": _before(Loop, "_note_published"),
        "before the sweep": _before(adapters, "remove_half_written", 2),
        "after the sweep": _after(adapters, "remove_half_written", 2),
    }


def controllers_boundaries() -> dict[str, Patch]:
    """Return the places between two steps of a publication, in their order."""
    from controller import publishing
    from controller.publishing import Publishing
    from store import version_states
    from trainer.publishing.model_server import ModelServer

    return {
        "before the load": _before(ModelServer, "load"),
        "after the load": _after(ModelServer, "load"),
        "after the probe": _before(publishing, "make_loaded"),
        "in the transaction of the load": _after(publishing, "make_loaded"),
        "before the promotion": _before(version_states, "promote"),
        "in the transaction of the promotion": _after(version_states, "promote"),
        "after the promotion": _before(publishing, "log_promoted"),
        "after the publication": _after(Publishing, "_publish"),
    }


BOUNDARIES: Final[Mapping[str, Callable[[], dict[str, Patch]]]] = {
    "trainer": trainers_boundaries,
    "controller": controllers_boundaries,
}


def die() -> None:
    """Die by `kill -9`, from within: at exactly this instruction."""
    os.kill(os.getpid(), signal.SIGKILL)


def _before(target: Any, name: str, time: int = 1) -> Patch:
    return _dying(target, name, time, is_after=False)


def _after(target: Any, name: str, time: int = 1) -> Patch:
    return _dying(target, name, time, is_after=True)


def _dying(target: Any, name: str, time: int, *, is_after: bool) -> Patch:
    """Return a patch: die before or after `target.name` did its work for the `time`-th time."""
    # Looked up now: a name that the trainer no longer has is an error before any life begins.
    real, left = getattr(target, name), [time]

    def at(after: bool) -> None:
        if after == is_after:
            left[0] -= 1
            if not left[0]:
                die()

    @wraps(real)
    async def asynchronous(*args: Any, **kwargs: Any) -> Any:
        at(False)
        result = await real(*args, **kwargs)
        at(True)
        return result

    @wraps(real)
    def synchronous(*args: Any, **kwargs: Any) -> Any:
        at(False)
        result = real(*args, **kwargs)
        at(True)
        return result

    dying = asynchronous if inspect.iscoroutinefunction(real) else synchronous
    return lambda: setattr(target, name, dying)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
