"""Evaluate the candidates of mode `evaluated` beside live traffic, one of each policy at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from pawl.controller.comparison import Comparison, Rule
from store.read.gates import Standing

log = structlog.get_logger()

# An evaluation that failed is tried again after this long; it goes on from its journal.
AGAIN_S: Final = 60.0

Evaluate = Callable[[Standing, Standing, Rule], Awaitable[Comparison]]


class Evaluations:
    """Keep the evaluations that go on, and what those that ended came to.

    A controller that is started again begins them again, and they go on from their journals.
    """

    def __init__(self, evaluate: Evaluate) -> None:
        """Begin without any; `evaluate` compares a candidate with what serves."""
        self._evaluate = evaluate
        self._tasks: dict[str, tuple[object, asyncio.Task[Comparison]]] = {}

    def outcome(self, candidate: Standing, serving: Standing, rule: Rule) -> Comparison | None:
        """Return what an evaluation of these two came to, or None while it goes on.

        If there is none of these two it begins, in place of that of another candidate.
        """
        name, key = candidate.version.name, (candidate.version.version, serving.version.version)
        known, task = self._tasks.get(name, (None, None))
        if task is None or known != key:
            self.forget(name)
            task = asyncio.create_task(self._until_done(candidate, serving, rule))
            self._tasks[name] = key, task
        return task.result() if task.done() else None

    def forget(self, name: str) -> None:
        """End a policy's evaluation: it has no candidate any more, or another one."""
        if name in self._tasks:
            self._tasks.pop(name)[1].cancel()

    async def _until_done(self, candidate: Standing, serving: Standing, rule: Rule) -> Comparison:
        """Evaluate, again and again until it does not fail; log a failure once."""
        logged: str | None = None
        while True:
            try:
                return await self._evaluate(candidate, serving, rule)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                if reason != logged:
                    version = candidate.version.served_name
                    log.exception("version_not_evaluated", version=version, again_in_s=AGAIN_S)
                logged = reason
            await asyncio.sleep(AGAIN_S)
