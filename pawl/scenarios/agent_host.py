"""Run a coroutine function for many tasks at once: requests and replies are lines of JSON.

A separate program, run by the Python in which an example's framework is installed. It needs only
the standard library, and ends when its standard input is closed.
"""

import asyncio
import importlib
import inspect
import json
import os
import sys
import traceback
from typing import Any

MAX_LINE = 2**26
KEPT_ERRORS = 2000


async def main(name: str) -> None:
    """Import the function `MODULE:FUNCTION`, write a first reply when ready, answer requests."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    # The agent's output goes to the log.
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    module, _, path = name.partition(":")
    function = getattr(importlib.import_module(module), path)
    parameters = inspect.signature(function).parameters

    def reply(message: dict[str, Any]) -> None:
        print(json.dumps(message, ensure_ascii=False), file=replies, flush=True)

    async def run_task_and_reply(request: dict[str, Any]) -> None:
        offered = {"base_url": request["base_url"], "model": request["model"]}
        accepted = {name: value for name, value in offered.items() if name in parameters}
        try:
            async with asyncio.timeout(request["limit_s"]) as limit:
                value = await function(request["task"], **accepted)
            result = {"output": value if isinstance(value, str) else json.dumps(value)}
        except BaseException as error:
            kind = "time limit" if limit.expired() else f"raised {type(error).__name__}"
            lines = "".join(traceback.format_exception(error))
            detail = lines.strip().rpartition("\n")[2]
            result = {"error": kind, "detail": detail, "errors": lines[-KEPT_ERRORS:]}
        reply({"id": request["id"], "result": result})

    requests = asyncio.StreamReader(limit=MAX_LINE)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(requests), sys.stdin
    )
    reply({"id": None})
    running = set()
    while line := await requests.readline():
        task = asyncio.create_task(run_task_and_reply(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
