"""Run a Python function in separate processes, one run at a time in each.

Each process is a `ProcessPoolExecutor` with one worker, so a function that hangs or crashes affects
no other run: its process is replaced.
"""

import asyncio
import importlib
import inspect
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pawl.programs import without_pawl_settings
from pawl.rollout.agents import (
    KEPT_ERRORS,
    MAX_OUTPUT,
    Agent,
    Request,
    Result,
    run_environment,
    time_limit_result,
)
from pawl.rollout.tasks import RolloutError

# A client made while the module is imported belongs to no run: its calls must fail.
NOWHERE: Final = "http://127.0.0.1:1/made-at-import-not-in-the-run"


class FunctionAgent(Agent):
    """Calls a Python function, in up to `at_once` processes, each of which imports it once."""

    def __init__(
        self, name: str, log: Path, at_once: int, *, option: str = "--python", folder: Path
    ) -> None:
        """Store MODULE:FUNCTION, searched in `folder` first; what it prints goes to `log`.

        Errors name the function as the value of the command line's `option`.
        """
        self._about = f"{option} {name}"
        self._log = log
        self._processes = [_Process(name, folder, log) for _ in range(at_once)]
        # Last in, first out: no more processes are started than needed.
        self._idle: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()
        for process in self._processes:
            self._idle.put_nowait(process)

    async def start(self) -> None:
        """Start the first process, or raise RolloutError if it cannot import the function."""
        try:
            await self._processes[-1].start()
        except ImportError as error:
            raise RolloutError(f"{self._about}: {error}. See {self._log}") from error

    async def stop(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.kill()

    async def run(self, request: Request) -> Result:
        """Call the function once in an idle process."""
        process = await self._idle.get()
        try:
            await process.start()
            async with asyncio.timeout(request.limit_s):
                return await process.call(request)
        except ImportError as error:
            return Result(error="not started", detail=str(error))
        except TimeoutError:
            process.kill()
            return time_limit_result(request.limit_s)
        except BrokenProcessPool:
            process.kill()
            return Result(error="crashed", detail=f"its process ended; see {self._log}")
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            self._idle.put_nowait(process)


class _Process:
    def __init__(self, *import_arguments: Any) -> None:
        self._import_arguments = import_arguments
        self._pool: ProcessPoolExecutor | None = None
        self._child: multiprocessing.process.BaseProcess | None = None

    async def start(self) -> None:
        """Start the process unless it runs; raise ImportError if it cannot import the function."""
        if self._pool is not None:
            return
        # Processes are forked from a server that has already imported Pawl's modules.
        context = multiprocessing.get_context("forkserver")
        own_modules = [
            name for name in sys.modules if name.startswith("pawl.") and name != "pawl.cli"
        ]
        context.set_forkserver_preload(own_modules)
        self._pool = ProcessPoolExecutor(1, context)
        others = multiprocessing.active_children()
        importing = self._pool.submit(_import_function, *self._import_arguments)
        [self._child] = set(multiprocessing.active_children()).difference(others)
        try:
            trouble = await asyncio.wrap_future(importing)
        except BrokenProcessPool:
            trouble = "its process ended during the import"
        except asyncio.CancelledError:
            self.kill()
            raise
        if trouble is not None:
            self.kill()
            raise ImportError(trouble)

    async def call(self, request: Request) -> Result:
        assert self._pool is not None
        calling = self._pool.submit(_call_function, request.task, request.environment)
        return Result(**await asyncio.wrap_future(calling))

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        if self._pool is None or self._child is None:
            return
        assert self._child.pid is not None
        self._child.kill()
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._child = None


# The functions below run in the function's process.

_function: Callable[..., Any]
_runner: asyncio.Runner


def _import_function(name: str, folder: Path, log: Path) -> str | None:
    """Import the function; return why this failed, or None."""
    global _function, _runner  # noqa: PLW0603
    # In its own process group, which can be killed as a whole and is not reached by Ctrl-C.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Only the owner may read what agents print.
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    kept = without_pawl_settings(os.environ)
    for variable in os.environ.keys() - kept.keys():
        del os.environ[variable]
    os.environ.update(run_environment(NOWHERE, given=kept))
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        _function = load_function(name)
    except BaseException as error:
        traceback.print_exc()
        trouble = traceback.format_exception_only(error)[-1].strip()
        return str(error) if isinstance(error, LookupError) else trouble
    # One event loop for all calls, as clients kept by the module are bound to it.
    _runner = asyncio.Runner()
    return None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(os.getpid(), signal.SIGKILL)


def load_function(name: str) -> Callable[..., Any]:
    """Return the function that `MODULE:FUNCTION` names, or raise LookupError."""
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise LookupError("it must be MODULE:FUNCTION, as in agent:answer")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise LookupError(f"there is no module {error.name!r} in {os.getcwd()} or installed") from (
            error
        )
    for part in path.split("."):
        if not hasattr(target, part):
            raise LookupError(f"the module {module_name!r} has no {path!r}")
        target = getattr(target, part)
    if not callable(target):
        raise LookupError(f"{name} is not a function")
    return target  # type: ignore[no-any-return]


def _call_function(task: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """Call the function; return the fields of a `Result`."""
    # `variables` has no ROLLOUT_TASK if the task is too long: remove the previous run's.
    os.environ.pop("ROLLOUT_TASK", None)
    os.environ.update(variables)
    try:
        value = _function(task)
        if inspect.isawaitable(value):
            value = _runner.run(_awaited(value))
        if not isinstance(value, str):
            value = "" if value is None else json.dumps(value, ensure_ascii=False, allow_nan=False)
    except SystemExit as error:
        return {"error": f"exit status {error.code}", "detail": "the agent called sys.exit"}
    except BaseException as error:
        return {
            "error": f"raised {type(error).__name__}",
            # `str(error)` may raise.
            "detail": str(traceback.TracebackException.from_exception(error))[:KEPT_ERRORS],
            "errors": "".join(traceback.format_exception(error))[-KEPT_ERRORS:],
        }
    if len(value) > MAX_OUTPUT:
        detail = f"it returned more than {MAX_OUTPUT} characters"
        return {"error": "too much output", "detail": detail}
    return {"output": value}


async def _awaited(value: Any) -> Any:
    return await value
