"""Run one trainer over a ledger: it is left alone, or has one life after another."""

import asyncio
import random
import signal
import time
from collections.abc import Callable
from typing import Final
from uuid import UUID

from benchmarks.chaos.trainer.database import Database
from benchmarks.chaos.trainer.forks import Zygote
from benchmarks.chaos.trainer.found import all_spent, held_by
from benchmarks.chaos.trainer.place import Lives, Place

# The last step before which an update has left nothing that its successor could finish.
RENAME: Final = "before the rename"
# What is come by only where a life before ended after this.
CLAIMED: Final = "after the claim"
OF_A_RELEASE: Final = frozenset({"before a release", "in the transaction of a release"})
STARTING: Final = "at random, as it starts"
WORKING: Final = "at random, at work"
AFTER_POSTGRES: Final = "some time after PostgreSQL"
UP: Final = b'"trainer_up"'
AT_BOUNDARY: Final = 0.4
IN_START: Final = 0.2
OF_POSTGRES: Final = 0.1
# A life that is asked to stop, and does not count as a kill, before every tenth that is killed.
ASKED_EVERY: Final = 10
FIRST_START_S: Final = 2.0
POLL_S: Final = 0.02
# A trainer whose database is away asks again after a second (`trainer.run`).
RETRY_S: Final = 1.0
LONGEST_S: Final = 120.0
# Each look is a session of PostgreSQL's: looking ten times a second takes a tenth of a core.
LOOK_S: Final = 0.5


class NotComeBy(Exception):
    """Report a boundary at which nothing dies, which every life must come by."""


class Run:
    """Run a trainer over the ledger of `place`, in lives that end as they are told."""

    def __init__(
        self,
        zygote: Zygote,
        database: Database,
        place: Place,
        upstream_port: int,
        before_a_life: Callable[[], None],
    ) -> None:
        self._before_a_life = before_a_life
        self._zygote = zygote
        self._database = database
        self.place = place
        self._start_s = FIRST_START_S
        self.lives = Lives()
        self._env = place.env(upstream_port)

    def to_its_end(self, disturb: Callable[["Run"], None]) -> None:
        """Be disturbed, and then left alone until every episode is spent."""
        started = time.monotonic()
        disturb(self)
        self._finish()
        self.lives.seconds = time.monotonic() - started

    def kill_at_each_boundary(self) -> None:
        """Start a life for each of the boundaries, which it dies at.

        Raises:
            NotComeBy: a life lived on: the trainer no longer does what the boundary is about.
        """
        for name in self._zygote.boundaries:
            if name in OF_A_RELEASE:
                self._life_to(CLAIMED)
            self._life_to(name)

    def _life_to(self, boundary: str) -> None:
        before = self.lives.killed[boundary]
        self._life(boundary, LONGEST_S)
        if self.lives.killed[boundary] == before:
            raise NotComeBy(f"no trainer died '{boundary}' in {LONGEST_S:g} s: mend boundaries.py")

    def kill(self, times: int, dice: random.Random, update_s: float) -> None:
        """Start so many lives, ended at boundaries and at random, spread over the whole ledger.

        The choice keeps the updates in step with the kills: while they are ahead, lives end
        before anything is written. `update_s` is what an undisturbed update takes.
        """
        boundaries = self._zygote.boundaries
        early = boundaries[: boundaries.index(RENAME) + 1]
        for number in range(times):
            progress = self.place.progress()
            ahead = progress > number / times
            if progress >= 1.0 and self._all_spent():
                self.lives.idle += 1
            if number % ASKED_EVERY == 0:
                with self._database.up():
                    self._asked(dice.uniform(0.0, update_s))
            if dice.random() < AT_BOUNDARY:
                # A boundary that it does not come by in this time is none of this life's.
                self._life(dice.choice(early if ahead else boundaries), 4.0 * update_s)
            elif not ahead and dice.random() < OF_POSTGRES:
                self._life_without_postgres(dice.uniform(0.0, update_s))
            elif dice.random() < IN_START:
                self._life(None, dice.uniform(0.0, self._start_s), once_up=False)
            else:
                longest = update_s * (1.0 if ahead else 3.0)
                self._life(None, dice.uniform(0.0, longest))

    def _life(self, boundary: str | None, seconds: float, *, once_up: bool = True) -> None:
        """Start a life that dies at a boundary, or after so many seconds (at work if `once_up`)."""
        pid, status = self._begin(boundary, once_up=once_up)
        if status is None:
            status = self._zygote.wait(pid, seconds)
        if status is None:
            by = WORKING if once_up else STARTING
            status = self._zygote.end(pid, signal.SIGKILL)
        else:
            by = boundary or "by itself"
        self.lives.killed[by] += 1
        if status != -signal.SIGKILL:
            self._note(f"status {status}, to be killed: {by}")

    def _life_without_postgres(self, seconds: float) -> None:
        """Start a life, kill PostgreSQL at its work and start it again, then kill the life."""
        pid, status = self._begin(None, once_up=True)
        if status is None:
            status = self._zygote.wait(pid, seconds)
        self._database.kill_and_start()
        if status is None:
            # Long enough to come back, to recover, and to be in the midst of the next update.
            status = self._zygote.wait(pid, RETRY_S + seconds)
        if status is None:
            status = self._zygote.end(pid, signal.SIGKILL)
        self.lives.killed[AFTER_POSTGRES] += 1
        if status != -signal.SIGKILL:
            self._note(f"status {status}, without PostgreSQL")

    def _asked(self, seconds: float) -> None:
        """Start a life, and ask it to stop at work (SIGTERM): it goes soon, and holds nothing."""
        held = self._held()
        pid, status = self._begin(None, once_up=True)
        if status is None:
            status = self._zygote.wait(pid, seconds)
        asked = time.monotonic()
        if status is None:
            status = self._zygote.end(pid, signal.SIGTERM)
        self.lives.stopped_after.append(time.monotonic() - asked)
        if status != 0:
            self._note(f"status {status}, asked to stop")
        # What the life before it left may still be there: it had no time to look.
        if self._held() - held:
            self._note("asked to stop, it kept its claim")

    def _note(self, what: str) -> None:
        """Note something that is not to be, with the end of the log."""
        self.lives.by_themselves.append(f"{what}: {self.place.said()[-1500:].decode()}")

    def _begin(self, boundary: str | None, *, once_up: bool) -> tuple[int, int | None]:
        """Start one, and wait until it is up; its id, and how it ended if it did."""
        self._before_a_life()
        started, said = time.monotonic(), len(self.place.said())
        pid = self._start(boundary)
        status = None
        while once_up and status is None and UP not in self.place.said()[said:]:
            status = self._zygote.wait(pid, POLL_S)
        if once_up and status is None:
            self._start_s = time.monotonic() - started
        return pid, status

    def _finish(self) -> None:
        """Start a life that is left alone until every episode is spent, and then asked to stop."""
        pid = self._start(None)
        status, progress, deadline = None, -1.0, 0.0
        while status is None and not self._all_spent():
            if self.place.progress() > progress:
                progress, deadline = self.place.progress(), time.monotonic() + LONGEST_S
            if time.monotonic() > deadline:
                self._note("the last life came no further")
                break
            status = self._zygote.wait(pid, LOOK_S)
        if status is None:
            status = self._zygote.end(pid, signal.SIGTERM)
        # Before it has a handler for it, SIGTERM ends it just so.
        if status not in (0, -signal.SIGTERM):
            self._note(f"the last life ended with status {status}")

    def _all_spent(self) -> bool:
        with self._database.up():
            return asyncio.run(all_spent(self.place.database_url, self.place.names))

    def _held(self) -> set[UUID]:
        with self._database.up():
            return asyncio.run(held_by(self.place.database_url, self.place.names))

    def _start(self, boundary: str | None) -> int:
        return self._zygote.start("trainer", self.place.log, self._env, dies=boundary)
