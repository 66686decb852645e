"""Keep a journal's file: append lines whole, and sync them before what depends on them is done."""

import asyncio
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from pawl.rollout.errors import RolloutError
from pawl.rollout.journal import Line, Past, Plan, differences, encoded, replay


class JournalFile:
    """Keep one rollout's journal open, for this process alone."""

    def __init__(self, path: Path) -> None:
        """Open the journal, which is made if it is not there, and lock it.

        Raises:
            RolloutError: it cannot be opened, or another process has it.
        """
        self.path = path
        self._written = 0
        self._synced = 0
        self._broken: RolloutError | None = None
        self._syncing = asyncio.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RolloutError(f"--journal: {path} cannot be opened: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise RolloutError(
                f"--journal: another pawl rollout is writing {path}; wait for it, or name another "
                "file"
            ) from error

    def open_plan(self, plan: Plan, *, again: bool = False) -> Past:
        """Return what was done already; a new journal begins with the plan.

        Raises:
            RolloutError: the journal is that of another plan, or no journal.
        """
        with self.path.open("rb") as lines:
            past = replay(lines, str(self.path), again=again)
        if past.plan is None:
            os.ftruncate(self._file, 0)
            self.append(plan)
            return past
        if differing := differences(past.plan, plan):
            raise RolloutError(
                f"--journal: {self.path} is of a rollout with another {', '.join(differing)}: "
                "name another file for this one, or remove it"
            )
        os.ftruncate(self._file, past.size)
        return past

    def plan(self) -> Plan | None:
        """Return the plan that the journal begins with, or None if it is new.

        Raises:
            RolloutError: it is no journal.
        """
        with self.path.open("rb") as lines:
            return replay([lines.readline()], str(self.path)).plan

    def append(self, *lines: Line) -> None:
        """Append lines; they outlive this process, and after `synced` the machine, too.

        Raises:
            RolloutError: the disk does not take them, or did not take others before.
        """
        if self._broken is not None:
            raise self._broken
        size = os.fstat(self._file).st_size
        data = memoryview(encoded(lines))
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._broken = RolloutError(
                f"--journal: {self.path} cannot be written ({error}); free space, and start the "
                "same command again"
            )
            # Half a line would spoil those that follow it; so nothing follows.
            with suppress(OSError):
                os.ftruncate(self._file, size)
            raise self._broken from error
        self._written += 1

    async def synced(self) -> None:
        """Wait until all that was appended before is on the disk; many wait for one sync."""
        mine = self._written
        async with self._syncing:
            if self._synced >= mine:
                return
            reached = self._written
            await asyncio.to_thread(os.fdatasync, self._file)
            self._synced = reached

    def close(self) -> None:
        """Close the file, which frees its lock."""
        with suppress(OSError):
            os.close(self._file)
