"""Keep a rollout's journal: a file of lines from which the same command goes on after a kill.

A run is begun, ended and posted, in this order, each a line. One that was begun and has no end was
under way when the runner was killed: that attempt is abandoned, and the run is made again as
another episode. What ended and was not posted is posted again, under the same idempotency key.
"""

import asyncio
import fcntl
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from pawl.judging.answers import Statement
from pawl.rollout.tasks import RolloutError
from store.records import Record, Split

# `unjudged`: the agent did its work, and the judge failed. `abandoned`: done again as another one.
Outcome = Literal["done", "failed", "unjudged", "abandoned"]
# A journal that was killed in its first line has this, or less.
BEGINNING: Final = b'{"line":"plan",'


class RolloutPlan(Record, frozen=True, kw_only=True, tag_field="line", tag="plan"):
    """State what is run, in the first line. A rollout goes on only with the same plan.

    An evaluation runs each task with `policy` and with `against`, and the tasks in the order of
    `seed`. `rule` is how the two are compared, in words.
    """

    tasks: str
    samples: int
    agent: str
    judge: str
    split: Split | None
    policy: str
    hidden: tuple[str, ...] = ()
    against: str = ""
    seed: int = 0
    rule: str = ""


class RunKey(NamedTuple):
    """Identify a run: the key is the same in each of its attempts.

    `policy` is the one of two that an evaluation runs it with; `""` in any other rollout.
    """

    task: str
    sample: int
    policy: str = ""


class Begun(Record, frozen=True, kw_only=True, tag_field="line", tag="begun"):
    """Note that a run was begun, as this episode."""

    episode: str
    key: RunKey


class Ended(Record, frozen=True, kw_only=True, tag_field="line", tag="ended"):
    """Note that an attempt ended.

    `error` is the kind of error, as `time limit` or `exit status 3`, or None; `detail` its message.
    `statements` are posted to `/feedback`.
    """

    episode: str
    outcome: Outcome
    error: str | None = None
    detail: str = ""
    status: int | None = None
    output: str = ""
    errors: str = ""
    seconds: float = 0.0
    statements: tuple[Statement, ...] = ()

    def without_output(self) -> "Ended":
        """Return the same without the long texts."""
        return msgspec.structs.replace(self, output="", errors="", detail="")


class Posted(Record, frozen=True, kw_only=True, tag_field="line", tag="posted"):
    """Note that `/feedback` took an attempt's statements, or refuses them for good (`refused`)."""

    episode: str
    refused: str | None = None


Line = RolloutPlan | Begun | Ended | Posted
DECODER: Final = msgspec.json.Decoder(Line)


class Past(NamedTuple):
    """Hold what a journal says.

    Ended attempts are kept without their outputs. `size` is the number of bytes of whole lines.
    """

    plan: RolloutPlan | None
    settled: dict[RunKey, Ended]
    unposted: list[Ended]
    under_way: list[Begun]
    size: int


def replay(lines: Iterable[bytes], file: str, *, again: bool = False) -> Past:
    """Return what a journal says.

    A last line without its newline was being written at a kill, and counts for nothing. With
    `again`, runs that failed, or that the judge failed on, count as not done.

    Raises:
        RolloutError: it is no journal.
    """
    kept = ("done",) if again else ("done", "failed", "unjudged")
    plan: RolloutPlan | None = None
    begun: dict[str, RunKey] = {}
    settled: dict[RunKey, Ended] = {}
    unposted: dict[str, Ended] = {}
    size = 0
    for number, text in enumerate(lines, start=1):
        if not text.endswith(b"\n"):
            if number == 1 and not (text.startswith(BEGINNING) or BEGINNING.startswith(text)):
                raise RolloutError(f"--journal: {file} is no journal of a rollout; name another")
            break
        size += len(text)
        match _line(text, number, file):
            case RolloutPlan() as line:
                plan = plan or line
            case Begun() as line:
                # The names of a task's many runs are in memory once.
                task, sample, policy = line.key
                begun[line.episode] = RunKey(sys.intern(task), sample, sys.intern(policy))
            case Ended() as line:
                key = begun.pop(line.episode, None)
                if key is not None and line.outcome in kept:
                    settled[key] = line.without_output()
                if line.statements:
                    unposted[line.episode] = line.without_output()
            case Posted() as line:
                unposted.pop(line.episode, None)
    under_way = [Begun(episode=episode, key=key) for episode, key in begun.items()]
    return Past(plan, settled, list(unposted.values()), under_way, size)


def _line(text: bytes, number: int, file: str) -> Line:
    try:
        line: Line = DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RolloutError(
            f"--journal: line {number} of {file} is no line of a rollout's journal "
            f"({error}); name another file"
        ) from error
    if number == 1 and not isinstance(line, RolloutPlan):
        raise RolloutError(f"--journal: {file} begins with no plan; name another file")
    return line


class Journal:
    """Keep one rollout's journal open, for this process alone; `past` is what it says at first."""

    def __init__(self, path: Path, *, again: bool = False) -> None:
        """Open the journal, which is made if it is not there, lock it, and read it (`replay`).

        Raises:
            RolloutError: it cannot be opened, is no journal, or another process has it.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RolloutError(f"--journal: {path} cannot be opened: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise RolloutError(
                f"--journal: another pawl rollout is writing {path}; wait for it, or name another "
                "file"
            ) from error
        try:
            with path.open("rb") as lines:
                self.past = replay(lines, str(path), again=again)
        except RolloutError:
            self.close()
            raise

    def begin(self, plan: RolloutPlan) -> None:
        """Begin a new journal with the plan, or go on with one that has the same.

        Raises:
            RolloutError: the journal is that of another plan.
        """
        past = self.past.plan
        if past is None:
            os.ftruncate(self._file, 0)
            self.append(plan)
            return
        fields = plan.__struct_fields__
        if differing := [one for one in fields if getattr(past, one) != getattr(plan, one)]:
            raise RolloutError(
                f"--journal: {self.path} is of a rollout with other {', '.join(differing)}: name "
                "another file for this one, or remove it"
            )
        os.ftruncate(self._file, self.past.size)

    def append(self, line: Line) -> None:
        """Append a line, or none of it; it outlives this process, and after `sync` the machine.

        Raises:
            RolloutError: the disk does not take it.
        """
        size = os.fstat(self._file).st_size
        data = memoryview(msgspec.json.encode(line) + b"\n")
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            # Half a line would spoil those that follow it.
            with suppress(OSError):
                os.ftruncate(self._file, size)
            raise RolloutError(
                f"--journal: {self.path} cannot be written ({error}); free space, and start the "
                "same command again"
            ) from error

    async def sync(self) -> None:
        """Wait until all that was appended is on the disk."""
        await asyncio.to_thread(os.fdatasync, self._file)

    def close(self) -> None:
        """Close the file, which frees its lock."""
        with suppress(OSError):
            os.close(self._file)
