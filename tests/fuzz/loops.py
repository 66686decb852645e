"""Runs a property's example on an event loop of its own, where nothing is raised unseen."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run(example: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run it; raise what any of its tasks or callbacks raised, too."""
    unseen: list[BaseException] = []
    tasks: list[asyncio.Task[Any]] = []

    async def watched() -> Result:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unseen.append(_raised(context)))
        loop.set_task_factory(lambda loop, work, **more: _kept(tasks, loop, work, more))
        return await example()

    try:
        return asyncio.run(watched())
    finally:
        # What a task raised tells more than what was missed because of it.
        unseen += [error for task in tasks if (error := _ended_with(task)) is not None]
        if unseen:
            raise unseen[0]


def _raised(context: dict[str, Any]) -> BaseException:
    error = context.get("exception")
    return error if isinstance(error, BaseException) else AssertionError(context["message"])


def _kept(
    tasks: list[asyncio.Task[Any]],
    loop: asyncio.AbstractEventLoop,
    work: Any,
    more: dict[str, Any],
) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **more)
    tasks.append(task)
    return task


def _ended_with(task: asyncio.Task[Any]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None
