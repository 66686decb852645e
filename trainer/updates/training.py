"""Run the learner in a thread, and write what it trained to disk.

The learner computes for minutes and blocks its thread; the event loop stays free to be stopped.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from trainer.batches.rows import Row
from trainer.learners.protocol import LearnerProtocol
from trainer.publishing import adapters
from trainer.publishing.adapters import NewVersion
from trainer.publishing.probe import ProbeRow

log = structlog.get_logger()

T = TypeVar("T")
# Seconds between attempts to write a version that the disk refused.
WRITE_AGAIN_S: Final = 5.0


class Training:
    """Run the steps of an update that need the learner, one at a time, each in a thread.

    If the caller of a method is cancelled, the learner is interrupted, and the cancellation goes on
    once the thread has ended.
    """

    def __init__(self, learner: LearnerProtocol, adapter_dir: Path) -> None:
        """Store the learner, and the folder that versions are written into."""
        self._learner = learner
        self._adapter_dir = adapter_dir

    async def train(self, parent: Path | None, rows: Sequence[Row]) -> dict[str, Any]:
        """Train the version in folder `parent` (None: the base) on `rows`; return the metrics.

        Raises:
            Unusable: some of the rows cannot be computed with.
            LearnerError: the update failed.
        """

        def work() -> dict[str, Any]:
            self._learner.restore(parent)
            return self._learner.update(rows)

        return await self._in_thread(work)

    async def probe_rows(self, rows: Sequence[Row]) -> tuple[ProbeRow, ...]:
        """Return `rows` as probes, with their log-probabilities under the trained policy."""
        found = await self._in_thread(partial(self._learner.logprobs, rows))
        return tuple(
            ProbeRow(ids=row.ids, logprobs=tuple(logprobs))
            for row, logprobs in zip(rows, found, strict=True)
        )

    async def write(self, new: NewVersion) -> Path:
        """Write the trained policy as version `new`, and return its folder.

        If the disk refuses, the trained weights are kept, and it is tried again until it succeeds.
        """
        write = partial(adapters.write_version, self._adapter_dir, new, self._learner.save)
        while True:
            try:
                folder = await self._in_thread(write)
            except OSError as error:
                log.error("version_not_written", reason=str(error), again_in_s=WRITE_AGAIN_S)
                await asyncio.sleep(WRITE_AGAIN_S)
            else:
                self._learner.saved_as(folder)
                return folder

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread; a cancelled caller waits until it has ended."""
        running = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._learner.interrupt()
            await asyncio.wait([running])
            raise
