"""Let a process die between two steps, without dying."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest


class Killed(BaseException):
    """Stand for kill -9: nothing catches it."""


def killing(target: Any, name: str, *, after: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """Patch `target.name` to die before or after it did its work, the first time."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(target, name)

        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.undo()
            if after:
                await real(*args, **kwargs)
            raise Killed

        def synchronous(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.undo()
            if after:
                real(*args, **kwargs)
            raise Killed

        is_async = inspect.iscoroutinefunction(real)
        monkeypatch.setattr(target, name, asynchronous if is_async else synchronous)

    return patch
