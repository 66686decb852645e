"""Evaluate the candidates of mode `evaluated` beside live traffic, one of each policy at a time."""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Final

import structlog

from pawl.controller.comparison import Comparison, Rule
from pawl.rollout.evaluation import EvaluationJob, evaluate
from pawl.rollout.setup import Setup
from pawl.settings import ClientSettings, read_settings
from store.read.gates import Standing
from trainer.recipes.recipe import EvaluationOptions

log = structlog.get_logger()

# An evaluation that failed is tried again after this long; it goes on from its journal.
AGAIN_S: Final = 60.0

# Runs at the same time: live traffic comes first.
AT_ONCE: Final = 2

Evaluate = Callable[[Standing, Standing, Rule], Awaitable[Comparison]]


class Evaluations:
    """Keep the evaluations that go on, and what those that ended came to.

    A controller that is started again begins them again, and they go on from their journals.
    """

    def __init__(self, evaluate: Evaluate) -> None:
        """Begin without any; `evaluate` compares a candidate with what serves."""
        self._evaluate = evaluate
        self._tasks: dict[str, tuple[object, asyncio.Task[Comparison]]] = {}
        # Why the last try of a policy's evaluation failed.
        self.errors: dict[str, Exception] = {}
        # Cancelled, and not ended yet.
        self._ending: set[asyncio.Task[Comparison]] = set()

    def outcome(self, candidate: Standing, serving: Standing, rule: Rule) -> Comparison | None:
        """Return what an evaluation of these two came to, or None while it goes on.

        If there is none of these two it begins, in place of that of another candidate.
        """
        name = candidate.version.name
        key = candidate.version.version, serving.version.version, rule
        known, task = self._tasks.get(name, (None, None))
        if task is None or known != key:
            self.forget(name)
            task = asyncio.create_task(self._until_done(candidate, serving, rule))
            self._tasks[name] = key, task
        return task.result() if task.done() else None

    def forget(self, name: str) -> None:
        """End a policy's evaluation: it has no candidate any more, or another one."""
        self.errors.pop(name, None)
        if name in self._tasks:
            _, task = self._tasks.pop(name)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all evaluations, and wait until they have ended."""
        for name in list(self._tasks):
            self.forget(name)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _until_done(self, candidate: Standing, serving: Standing, rule: Rule) -> Comparison:
        """Evaluate, again and again until it does not fail; log a failure once.

        What still fails `decide_within_h` after it began has found nothing: no other version waits
        for it any longer.
        """
        clock, version = asyncio.get_running_loop().time, candidate.version
        began = clock()
        while True:
            try:
                comparison = await self._evaluate(candidate, serving, rule)
            except Exception as error:
                if repr(error) != repr(self.errors.get(version.name)):
                    served = version.served_name
                    log.exception("version_not_evaluated", version=served, again_in_s=AGAIN_S)
                self.errors[version.name] = error
            else:
                self.errors.pop(version.name, None)
                return comparison
            if clock() - began >= 3600 * rule.decide_within_h:
                return Comparison(rule)
            await asyncio.sleep(AGAIN_S)


async def evaluate_candidate(candidate: Standing, serving: Standing, rule: Rule) -> Comparison:
    """Run the tasks of the candidate's recipe with both versions, and return what they came to.

    An evaluation that was killed goes on from its journal, unless the machine lost that, or tasks
    or rule are others. It ends after `decide_within_h`, undecided if need be.

    Raises:
        pydantic.ValidationError: the candidate's rule has no `evaluation` that can be read.
        RolloutError: the tasks or the agent cannot be run: no proxy answers, there is no such file.
        OSError: the tasks cannot be read, or the journal not written.
    """
    options = EvaluationOptions.model_validate((candidate.gate or {}).get("evaluation"))
    new, old = (f"{one.version.name}@{one.version.version}" for one in (candidate, serving))
    folder = Path(tempfile.gettempdir()) / f"pawl-evaluations-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's: remove it, for a controller's journals")
    tasks = Path(options.tasks)
    # The name of a version may have been another's, in a database of before.
    about = repr((candidate.version.update_id, sorted((candidate.gate or {}).items())))
    digest = sha256(about.encode() + await asyncio.to_thread(tasks.read_bytes)).hexdigest()
    setup = Setup(
        tasks=tasks,
        journal=folder / f"{new}-{serving.version.version}-{digest[:16]}.jsonl",
        url=options.url.rstrip("/").removesuffix("/v1"),
        headers=read_settings(ClientSettings).headers,
        command=options.command,
        python=options.python,
        judge=options.judge,
        answer=options.answer,
        limit_s=options.timeout_s,
        at_once=AT_ONCE,
    )
    job = EvaluationJob(
        setup=setup,
        new=new,
        old=old,
        rule=rule,
        tries=options.tries,
        most_runs=options.most_runs,
    )
    return (await evaluate(job, within_s=3600 * rule.decide_within_h)).comparison
