"""The journal of a rollout: a file of JSON lines, from which a killed rollout is resumed.

An attempt at a run has a line for its beginning, its end, and the posting of its feedback. Without
an end it was under way when the rollout was killed: it is abandoned, and the run is repeated as
another episode. If it ended and its feedback was not accepted, this is posted again, with the same
idempotency key.
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

# `unjudged`: the agent succeeded, and the judge failed. `abandoned`: the attempt does not count.
Outcome = Literal["done", "failed", "unjudged", "abandoned"]
# A journal cut off in its first line begins with this, or is a part of this.
BEGINNING: Final = b'{"line":"plan",'


class RolloutPlan(Record, frozen=True, kw_only=True, tag_field="line", tag="plan"):
    """A journal's first line: the work. A rollout can be resumed only with the same plan.

    `tasks` is a hash of the tasks. An evaluation runs each task with `policy` and with `against`,
    in a random order given by `seed`. `rule` describes in words how the two are compared.
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
    """The key of a run, shared by all its attempts.

    `policy` is the version that an evaluation runs the task with; `""` in other rollouts.
    """

    task: str
    sample: int
    policy: str = ""


class Begun(Record, frozen=True, kw_only=True, tag_field="line", tag="begun"):
    episode: str
    key: RunKey


class Ended(Record, frozen=True, kw_only=True, tag_field="line", tag="ended"):
    """The end of an attempt.

    `error` is the kind of error, such as `time limit` or `exit status 3`, or None; `detail` is its
    message. `statements` are posted to `/feedback`.
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
        """Return a copy without the long texts."""
        return msgspec.structs.replace(self, output="", errors="", detail="")


class Posted(Record, frozen=True, kw_only=True, tag_field="line", tag="posted"):
    """`/feedback` accepted an attempt's statements, or refused them for good (`refused`)."""

    episode: str
    refused: str | None = None


Line = RolloutPlan | Begun | Ended | Posted
DECODER: Final = msgspec.json.Decoder(Line)


class JournalContent(NamedTuple):
    """The content of a journal.

    `settled` has for each settled run the attempt that counts, `unposted` the attempts whose
    statements are to be posted; both are without outputs. `under_way` has the attempts without an
    end. `size` is the number of bytes in complete lines.
    """

    plan: RolloutPlan | None
    settled: dict[RunKey, Ended]
    unposted: list[Ended]
    under_way: list[Begun]
    size: int


def read_journal(lines: Iterable[bytes], file: str, *, again: bool = False) -> JournalContent:
    """Return the content of a journal.

    A last line without a newline was cut off by a kill, and is ignored. With `again`, failed and
    unjudged runs are not settled.

    Raises:
        RolloutError: the file is not a journal.
    """
    settling = ("done",) if again else ("done", "failed", "unjudged")
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
        match _parse_line(text, number, file):
            case RolloutPlan() as line:
                plan = plan or line
            case Begun() as line:
                # Interned, as many runs share these names.
                task, sample, policy = line.key
                begun[line.episode] = RunKey(sys.intern(task), sample, sys.intern(policy))
            case Ended() as line:
                key = begun.pop(line.episode, None)
                if key is not None and line.outcome in settling:
                    settled[key] = line.without_output()
                if line.statements:
                    unposted[line.episode] = line.without_output()
            case Posted() as line:
                unposted.pop(line.episode, None)
    under_way = [Begun(episode=episode, key=key) for episode, key in begun.items()]
    return JournalContent(plan, settled, list(unposted.values()), under_way, size)


def _parse_line(text: bytes, number: int, file: str) -> Line:
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
    """An open journal, locked for this process; `past` is its content when opened."""

    def __init__(self, path: Path, *, again: bool = False) -> None:
        """Open or create the journal, lock it, and read it (`read_journal`).

        Raises:
            RolloutError: it cannot be opened, is not a journal, or is locked by another process.
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
                self.past = read_journal(lines, str(path), again=again)
        except RolloutError:
            self.close()
            raise

    def begin(self, plan: RolloutPlan) -> None:
        """Write the plan to a new journal, or check that an existing one has the same.

        Raises:
            RolloutError: the journal has another plan.
        """
        past = self.past.plan
        if past is None:
            os.ftruncate(self._file, 0)
            self.append(plan)
            return
        fields = plan.__struct_fields__
        if differing := [one for one in fields if getattr(past, one) != getattr(plan, one)]:
            raise RolloutError(
                f"--journal: {self.path} belongs to a rollout with other {', '.join(differing)}: "
                "name another file for this one, or remove it"
            )
        os.ftruncate(self._file, self.past.size)

    def append(self, line: Line) -> None:
        """Append a whole line, which survives a kill, and after `sync` also a crash of the machine.

        Raises:
            RolloutError: the line cannot be written; a part of it is removed again.
        """
        size = os.fstat(self._file).st_size
        data = memoryview(msgspec.json.encode(line) + b"\n")
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            # Half a line would corrupt the next one.
            with suppress(OSError):
                os.ftruncate(self._file, size)
            raise RolloutError(
                f"--journal: {self.path} cannot be written ({error}); free space, and start the "
                "same command again"
            ) from error

    async def sync(self) -> None:
        """Wait until all appended lines are on disk."""
        await asyncio.to_thread(os.fdatasync, self._file)

    def close(self) -> None:
        """Close the file, which frees its lock."""
        with suppress(OSError):
            os.close(self._file)
