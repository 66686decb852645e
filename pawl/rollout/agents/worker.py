"""Import an agent's function once, and run it for one task after another: a warm worker.

A program of its own, started by `pawl.rollout.agents.warm`, that needs the standard library alone.
Requests come on standard input and replies leave on standard output, one JSON object a line. What
the agent prints goes to standard error. The worker ends when its standard input does.
"""

import asyncio
import importlib
import inspect
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

Message = dict[str, Any]
# A client that is made while the module is imported knows no run: its calls must fail, loudly.
NOWHERE = "http://127.0.0.1:1/made-at-import-not-in-the-run"
KEPT_ERRORS = 2000
# A longer reply would not be read, and would end the worker with all the runs in it.
MOST_OUTPUT = 2**20


class Worker:
    """Run a function, one task at a time, or several where it is safe (`shared`)."""

    def __init__(
        self, function: Callable[..., Any], model_is_told: bool, replies: BinaryIO
    ) -> None:
        """Store the function, and see which arguments it takes.

        Args:
            function: the agent.
            model_is_told: whether requests name a model.
            replies: where replies are written.
        """
        self._function = function
        self._replies = replies
        takes = inspect.signature(function).parameters
        self._named = [name for name in ("base_url", "model") if name in takes]
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        )
        # The environment is one for the whole process: a function that reads it runs alone.
        needed = {"base_url", "model"} if model_is_told else {"base_url"}
        self.shared = self.is_async and needed <= set(self._named)

    def reply(self, message: Message) -> None:
        """Write one reply, whole."""
        line = json.dumps(message, ensure_ascii=False, allow_nan=False)
        self._replies.write(line.encode(errors="replace") + b"\n")
        self._replies.flush()

    def run(self, request: Message) -> None:
        """Run a plain function for one request; the runner kills this process if it takes long."""
        try:
            answer = _returned(self._call(request))
        except BaseException as error:
            answer = _failure(error)
        self.reply({"id": request["id"]} | answer)

    async def run_async(self, request: Message) -> None:
        """Run a coroutine function for one request, within its time limit."""
        try:
            async with asyncio.timeout(request["limit_s"]) as limit:
                value = await self._call(request)
            answer = _returned(value)
        except BaseException as error:
            # Also a CancelledError of its own: who waits for the reply would wait for ever.
            answer = _failure(error) | ({"error": "time limit"} if limit.expired() else {})
        self.reply({"id": request["id"]} | answer)

    def _call(self, request: Message) -> Any:
        if not self.shared:
            # Left out where it is too long: then that of the run before must not stay.
            os.environ.pop("ROLLOUT_TASK", None)
            os.environ.update(request["environment"])
        return self._function(request["task"], **{name: request[name] for name in self._named})


def _returned(value: Any) -> Message:
    if len(as_text(value)) > MOST_OUTPUT:
        detail = f"it returned more than {MOST_OUTPUT} characters"
        return {"error": "too much output", "detail": detail}
    return {"value": value}


def as_text(value: Any) -> str:
    """Return what a function returned as an output: a text as it is, anything else as JSON.

    Raises:
        TypeError: it cannot be written as JSON.
        ValueError: it holds a number that JSON has not.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _failure(error: BaseException) -> Message:
    if isinstance(error, SystemExit):
        return {"error": f"exit status {error.code}", "detail": "the agent called sys.exit"}
    shown = "".join(traceback.format_exception(error))
    return {
        "error": f"raised {type(error).__name__}",
        # Not str(error), which may raise in its turn.
        "detail": str(traceback.TracebackException.from_exception(error))[:KEPT_ERRORS],
        "errors": shown[-KEPT_ERRORS:],
    }


def load(name: str) -> Callable[..., Any]:
    """Return the function that `MODULE:FUNCTION` names; modules of the working folder come first.

    Raises:
        LookupError: there is no such module or function.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise LookupError("it must be MODULE:FUNCTION, as in agent:answer")
    sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise LookupError(
            f"there is no module {error.name!r} in {os.getcwd()} or installed"
        ) from error
    for part in path.split("."):
        if not hasattr(target, part):
            raise LookupError(f"the module {module_name!r} has no {path!r}")
        target = getattr(target, part)
    if not callable(target):
        raise LookupError(f"{name} is not a function")
    return target  # type: ignore[no-any-return]


def serve(worker: Worker, requests: BinaryIO) -> None:
    """Run requests as they come, until there are no more; then the process ends."""
    waiting: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def read(take: Callable[[Message], object]) -> None:
        # A thread, so that the end of the runner ends this process while an agent works, too.
        for line in requests:
            take(json.loads(line))
        os._exit(0)

    worker.reply({"ready": True, "shared": worker.shared})
    if worker.is_async:
        asyncio.run(_serve_async(worker, read))
    else:
        # In the main thread and outside of any event loop, as in a program of its own.
        threading.Thread(target=read, args=(waiting.put,), daemon=True).start()
        while True:
            worker.run(waiting.get())


async def _serve_async(worker: Worker, read: Callable[[Callable[[Message], object]], None]) -> None:
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    def begin(request: Message) -> None:
        task = loop.create_task(worker.run_async(request))
        running.add(task)
        task.add_done_callback(running.discard)

    def take(request: Message) -> None:
        loop.call_soon_threadsafe(begin, request)

    threading.Thread(target=read, args=(take,), daemon=True).start()
    await loop.create_future()


def main(name: str, model_is_told: bool) -> None:
    """Import the function, say so, and serve."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    try:
        worker = Worker(load(name), model_is_told, replies)
    except Exception as error:
        known = isinstance(error, LookupError)
        detail = str(error) if known else "".join(traceback.format_exception_only(error)).strip()
        replies.write(json.dumps({"ready": False, "error": detail}).encode() + b"\n")
        replies.flush()
        traceback.print_exc()
        sys.exit(1)
    serve(worker, requests)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "model")
