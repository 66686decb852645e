"""Run all that a plan asks for: so many at once, each written down before it is told."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, Final
from uuid import uuid4

from pawl.rollout.agents.agent import Agent, Result
from pawl.rollout.attempts import Attempts, Job, lost
from pawl.rollout.desk import Desk
from pawl.rollout.errors import Refused
from pawl.rollout.figures import Figures
from pawl.rollout.journal import Begun, Finished, Key, Past, Told, abandoned, bare, outline
from pawl.rollout.journal_file import JournalFile
from pawl.rollout.judges import RunJudge
from pawl.rollout.proxy_view import ProxyView

TELLERS: Final = 8
# After Ctrl-C, feedback that was not taken in this time is left to the next start.
LEAVE_S: Final = 10.0

OnEnd = Callable[[Key, Finished, Result], None]


class Rollout:
    """Run one rollout; `figures` shows how far it is, `untold` what `/feedback` has not taken."""

    def __init__(
        self,
        job: Job,
        agent: Agent,
        judge: RunJudge,
        journal: JournalFile,
        desk: Desk,
        view: ProxyView,
        *,
        on_end: OnEnd | None = None,
    ) -> None:
        """Store the parts, which have been started; `on_end` is called for each attempt's end."""
        self._job = job
        self._journal = journal
        self._desk = desk
        self._view = view
        self._on_end = on_end
        self._attempts = Attempts(job, agent, judge, view)
        # Names never repeat, whatever becomes of the journal.
        self._launch = uuid4().hex[:12]
        self._numbers = itertools.count(1)
        self._to_tell: asyncio.Queue[Finished] = asyncio.Queue()
        self.untold = 0
        self._lanes: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self.under_way = 0
        self.figures = Figures(job.runs)

    @property
    def stopping(self) -> bool:
        """Return whether no more runs are begun."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Begin no more runs; called again, give up those that are under way."""
        if self.stopping:
            for lane in self._lanes:
                lane.cancel()
        self._stop.set()

    async def run(self, past: Past) -> None:
        """Do what the journal has not got yet, and return when all is told.

        Raises:
            RolloutError: the journal cannot be written.
        """
        self._resume(past)
        tellers = [asyncio.create_task(self._tell_all()) for _ in range(TELLERS)]
        try:
            await self._run_lanes(past)
            await self._all_told(tellers)
        finally:
            for teller in tellers:
                teller.cancel()
            await asyncio.wait(tellers)

    def _resume(self, past: Past) -> None:
        """Count what is done, and tell what is not told: also that attempts were broken off."""
        for key, settled in past.settled.items():
            self.figures.add(key.policy, settled)
        for finished in past.untold:
            self._tell(finished)
        # Each is let go of when it is told.
        past.untold.clear()
        for begun in past.under_way:
            self._give_up(begun.key, begun.episode)

    def _give_up(self, key: Key, episode: str) -> None:
        """Write down that an attempt was broken off, and tell it."""
        finished = abandoned(episode)
        self._journal.append(finished)
        self._tell(finished)
        self.figures.add(key.policy, outline(finished))

    async def _run_lanes(self, past: Past) -> None:
        left = (key for key in self._job.every_run() if key not in past.settled)
        self._lanes = [asyncio.create_task(self._lane(left)) for _ in range(self._job.at_once)]
        try:
            done, _ = await asyncio.wait(self._lanes, return_when=asyncio.FIRST_EXCEPTION)
            for lane in done:
                if not lane.cancelled():
                    lane.result()
            await asyncio.wait(self._lanes)
        finally:
            for lane in self._lanes:
                lane.cancel()
            await asyncio.wait(self._lanes)

    async def _lane(self, left: Iterator[Key]) -> None:
        while not self.stopping and (key := next(left, None)) is not None:
            while not await self._settle(key) and not self.stopping:
                await self._unless_stopped(self._view.wait())

    async def _unless_stopped(self, work: Coroutine[Any, Any, object]) -> bool:
        """Return whether the work is done; it is broken off when the rollout is stopped."""
        stopped, working = asyncio.create_task(self._stop.wait()), asyncio.create_task(work)
        try:
            await asyncio.wait([stopped, working], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            working.cancel()
            await asyncio.wait([stopped, working])
        if working.cancelled():
            return False
        working.result()
        return True

    async def _settle(self, key: Key) -> bool:
        """Make one attempt; return whether it counts."""
        episode = f"rollout-{self._launch}-{next(self._numbers)}"
        self._journal.append(Begun(episode=episode, key=key))
        started = asyncio.get_running_loop().time()
        self.under_way += 1
        try:
            finished, result = await self._attempts.make(key, episode)
        except asyncio.CancelledError:
            self._give_up(key, episode)
            raise
        finally:
            self.under_way -= 1
        if finished.outcome == "failed" and not await self._view.answered_since(started):
            # The proxy was away, or the model server: that is no fault of the agent's.
            finished = lost(episode, "proxy away", finished.detail)
        self._journal.append(finished)
        # Nothing is told before it is certain that it is never done again.
        await self._journal.synced()
        if finished.statements:
            self._tell(finished)
        self.figures.add(key.policy, outline(finished))
        if self._on_end is not None:
            self._on_end(key, finished, result)
        return finished.outcome != "abandoned"

    def _tell(self, finished: Finished) -> None:
        self.untold += 1
        self._to_tell.put_nowait(bare(finished))

    async def _tell_all(self) -> None:
        while True:
            finished = await self._to_tell.get()
            refused = None
            try:
                await self._desk.tell(finished)
            except Refused as error:
                refused = str(error)
                self.figures.refused += 1
                self.figures.errors["feedback refused"] += 1
            self._journal.append(Told(episode=finished.episode, refused=refused))
            self.untold -= 1
            self._to_tell.task_done()

    async def _all_told(self, tellers: list[asyncio.Task[None]]) -> None:
        """Wait until all is told; once stopped, for a while only. A teller that fails ends it."""
        if not await self._unless_stopped(self._told(tellers)):
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._told(tellers)

    async def _told(self, tellers: list[asyncio.Task[None]]) -> None:
        all_told = asyncio.create_task(self._to_tell.join())
        try:
            done, _ = await asyncio.wait([all_told, *tellers], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            all_told.cancel()
