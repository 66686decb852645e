"""Run a Python function for one task after the other, or for many at once, in a process of its own.

A separate program, run by the Python in which the agent's packages are installed, so it needs only
the standard library. Requests and replies are lines of JSON on standard input and output. When
standard input is closed, it kills its process group.
"""

import asyncio
import importlib
import inspect
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

MAX_LINE = 2**26
MAX_OUTPUT = 2**20
# Characters kept of standard error or of a traceback.
KEPT_ERRORS = 2000

Requests = SimpleQueue[dict[str, Any]]
Reply = Callable[[int | None, dict[str, Any]], None]


def main(name: str, mode: str) -> None:
    """Import `MODULE:FUNCTION`, write a first reply, and answer requests.

    In the mode `many`, calls run at the same time; in the mode `one`, one after the other. The
    first reply has the reason why the function cannot be imported, or none.
    """
    reply, requests = _reply_on_output(), _requests_from_input()
    sys.path.insert(0, os.getcwd())
    try:
        function = load_function(name)
    except BaseException as error:
        traceback.print_exc()
        trouble = traceback.format_exception_only(error)[-1].strip()
        reply(None, {"error": str(error) if isinstance(error, LookupError) else trouble})
        return
    reply(None, {})
    if mode == "many":
        asyncio.run(_call_concurrently(function, requests, reply))
    # One event loop for all calls, as clients kept by the module are bound to it.
    runner = asyncio.Runner()
    while True:
        request = requests.get()
        # A task that is too long has no variable: remove that of the run before.
        os.environ.pop("ROLLOUT_TASK", None)
        os.environ.update(request["environment"])
        try:
            value = function(request["task"])
            result = _result_of(
                runner.run(_awaited(value)) if inspect.isawaitable(value) else value
            )
        except BaseException as error:
            result = _failure_of(error)
        reply(request["id"], result)


async def _call_concurrently(
    function: Callable[..., Any], requests: Requests, reply: Reply
) -> None:
    """Call a coroutine function for each request at once; `base_url` and `model` are parameters."""
    parameters = inspect.signature(function).parameters

    async def call(request: dict[str, Any]) -> None:
        environment, limit_s = request["environment"], request["limit_s"]
        offered = {
            "base_url": environment["OPENAI_BASE_URL"],
            "model": environment.get("OPENAI_MODEL"),
        }
        accepted = {name: value for name, value in offered.items() if name in parameters}
        try:
            async with asyncio.timeout(limit_s) as limit:
                value = await function(request["task"], **accepted)
            result = _result_of(value)
        except BaseException as error:
            result = _failure_of(error)
            if limit.expired():
                result |= {"error": "time limit", "detail": f"not done within {limit_s:g} s"}
        reply(request["id"], result)

    async with asyncio.TaskGroup() as running:
        while True:
            running.create_task(call(await asyncio.to_thread(requests.get)))


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


async def _awaited(value: Any) -> Any:
    return await value


def _result_of(value: Any) -> dict[str, Any]:
    """Return the result of a call from the value that the function returned."""
    if not isinstance(value, str):
        value = "" if value is None else json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(value) > MAX_OUTPUT:
        detail = f"it returned more than {MAX_OUTPUT} characters"
        return {"error": "too much output", "detail": detail}
    return {"output": value}


def _failure_of(error: BaseException) -> dict[str, Any]:
    """Return the result of a call that raised `error`."""
    if isinstance(error, SystemExit):
        return {"error": f"exit status {error.code}", "detail": "the agent called sys.exit"}
    return {
        "error": f"raised {type(error).__name__}",
        # `str(error)` may raise.
        "detail": str(traceback.TracebackException.from_exception(error))[:KEPT_ERRORS],
        "errors": "".join(traceback.format_exception(error))[-KEPT_ERRORS:],
    }


def _reply_on_output() -> Reply:
    """Return the function that writes a reply; what the agent prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    os.dup2(2, 1)
    # Daemons that the agent forks would keep it open.
    os.register_at_fork(after_in_child=lambda: os.close(replies.fileno()))

    def reply(number: int | None, result: dict[str, Any]) -> None:
        line = json.dumps({"id": number, "result": result}, ensure_ascii=False)
        print(line, file=replies, flush=True)

    return reply


def _requests_from_input() -> Requests:
    """Return the queue of requests; the agent's own standard input is empty."""
    lines = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    requests: Requests = SimpleQueue()

    def read() -> None:
        for line in lines:
            requests.put(json.loads(line))
        os.killpg(os.getpid(), signal.SIGKILL)

    # A thread, which sees the end of the input while the function blocks all else.
    threading.Thread(target=read, daemon=True).start()
    return requests


if __name__ == "__main__":
    main(*sys.argv[1:])
