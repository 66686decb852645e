"""Run the learner in a thread that can be stopped."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import structlog

from trainer.errors import Interrupted
from trainer.learners.protocol import LearnerProtocol

log = structlog.get_logger()

T = TypeVar("T")


async def in_thread(learner: LearnerProtocol, work: Callable[[], T]) -> T:
    """Run `work`, which uses the learner, in a thread; a cancelled caller waits until it has ended.

    The learner is interrupted then, and the cancellation goes on.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        learner.interrupt()
        await asyncio.wait([running])
        # Looked at: asyncio prints a trace of an exception that nobody has seen.
        error = running.exception()
        if not (error is None or isinstance(error, Interrupted)):
            log.warning("error_while_stopping", reason=f"{type(error).__name__}: {error}")
        raise
