"""Read back from a journal's lines what a rollout has done (pure).

A run is begun, ended and told, in this order, each a line. One that was begun and has no end was
under way when the runner was killed: that attempt is abandoned, and the run is made again as
another episode. What ended and was not told is told again, under the same idempotency key.
"""

import sys
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

import msgspec

from pawl.judging.answers import Statement
from pawl.rollout.errors import RolloutError
from pawl.rollout.verdicts import metrics_of
from store.records import Record, Split

# `unjudged`: the agent did its work, and the judge failed. `abandoned`: done again as another one.
Outcome = Literal["done", "failed", "unjudged", "abandoned"]
ABANDONED: Final = "run_abandoned"
FAILED: Final = "run_failed"
# A journal that was killed in its first line has this, or less.
BEGINNING: Final = b'{"line":"plan",'


class Plan(Record, frozen=True, kw_only=True, tag_field="line", tag="plan"):
    """State what is run, in the first line. A rollout goes on only with the same plan."""

    tasks: str
    samples: int
    agent: str
    judge: str
    split: Split | None
    policies: tuple[str, ...]
    hidden: tuple[str, ...] = ()


class Key(NamedTuple):
    """Identify a run: the key is the same in each of its attempts."""

    policy: str
    task: str
    sample: int


class Begun(Record, frozen=True, kw_only=True, tag_field="line", tag="begun"):
    """Note that a run was begun, as this episode."""

    episode: str
    key: Key


class Finished(Record, frozen=True, kw_only=True, tag_field="line", tag="ended"):
    """Note that an attempt ended.

    Attributes:
        episode: its episode.
        outcome: what became of it.
        error: the kind of error, as `time limit` or `exit status 3`; None if there was none.
        detail: what the error said.
        status: the program's exit status, if it is one.
        output: what the agent printed or returned.
        errors: the end of its standard error.
        seconds: how long it took.
        version: the policy version that served meanwhile, if it is known.
        statements: what `/feedback` is told of it.
    """

    episode: str
    outcome: Outcome
    error: str | None = None
    detail: str = ""
    status: int | None = None
    output: str = ""
    errors: str = ""
    seconds: float = 0.0
    version: str | None = None
    statements: tuple[Statement, ...] = ()


class Told(Record, frozen=True, kw_only=True, tag_field="line", tag="told"):
    """Note that `/feedback` took an attempt's statements, or refuses them for good (`refused`)."""

    episode: str
    refused: str | None = None


Line = Plan | Begun | Finished | Told
DECODER: Final = msgspec.json.Decoder(Line)


class Outline(Record, frozen=True, kw_only=True):
    """Hold what counts of an attempt's end, long after its output and statements are gone.

    Attributes:
        outcome: as in `Finished`, like `error` and `version`.
        metrics: the mean value of each metric that was stated of it.
    """

    outcome: Outcome
    error: str | None
    version: str | None
    metrics: dict[str, float]


class Past(NamedTuple):
    """Hold what the journal says, and no more of it than is needed to go on.

    Attributes:
        plan: what is run; None: the journal is new.
        settled: the runs that are done.
        untold: the attempts that `/feedback` has not taken, without their outputs.
        under_way: those that have no end.
        size: the bytes of the whole lines.
    """

    plan: Plan | None
    settled: dict[Key, Outline]
    untold: list[Finished]
    under_way: list[Begun]
    size: int


def replay(lines: Iterable[bytes], file: str, *, again: bool = False) -> Past:
    """Return what a journal says.

    A last line without its newline was being written at a kill, and counts for nothing.

    Args:
        lines: the journal's lines, with their ends; each is let go of before the next is asked for.
        file: its name, for messages.
        again: runs that failed, or that the judge failed on, count as not done.

    Raises:
        RolloutError: it is no journal.
    """
    kept = ("done",) if again else ("done", "failed", "unjudged")
    plan: Plan | None = None
    begun: dict[str, Key] = {}
    settled: dict[Key, Outline] = {}
    untold: dict[str, Finished] = {}
    size = 0
    for number, text in enumerate(lines, start=1):
        if not text.endswith(b"\n"):
            _check_torn(text, number, file)
            break
        size += len(text)
        match _line(text, number, file):
            case Plan() as line:
                plan = plan or line
            case Begun() as line:
                begun[line.episode] = _shared(line.key)
            case Finished() as line:
                key = begun.pop(line.episode, None)
                if key is not None and line.outcome in kept:
                    settled[key] = outline(line)
                if line.statements:
                    untold[line.episode] = bare(line)
            case Told() as line:
                untold.pop(line.episode, None)
    under_way = [Begun(episode=episode, key=key) for episode, key in begun.items()]
    return Past(plan, settled, list(untold.values()), under_way, size)


def _line(text: bytes, number: int, file: str) -> Line:
    try:
        line: Line = DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RolloutError(
            f"--journal: line {number} of {file} is no line of a rollout's journal "
            f"({error}); name another file"
        ) from error
    if number == 1 and not isinstance(line, Plan):
        raise RolloutError(f"--journal: {file} begins with no plan; name another file")
    return line


def _check_torn(text: bytes, number: int, file: str) -> None:
    if number == 1 and not (text.startswith(BEGINNING) or BEGINNING.startswith(text)):
        raise RolloutError(f"--journal: {file} is no journal of a rollout; name another file")


def _shared(key: Key) -> Key:
    """Return a key whose names are in memory once, however many runs a task has."""
    return Key(sys.intern(key.policy), sys.intern(key.task), key.sample)


def outline(finished: Finished) -> Outline:
    """Return what counts of an attempt's end."""
    version = finished.version
    return Outline(
        outcome=finished.outcome,
        error=finished.error,
        version=version if version is None else sys.intern(version),
        metrics=metrics_of(finished.statements),
    )


def bare(finished: Finished) -> Finished:
    """Return an attempt's end with what is still to be told of it, and without its output."""
    return msgspec.structs.replace(finished, output="", errors="", detail="")


def abandoned(episode: str) -> Finished:
    """Return the end of an attempt that does not count, and says so in the ledger."""
    statement = {"metric": ABANDONED, "value": 1, "episode": episode}
    return Finished(episode=episode, outcome="abandoned", statements=(statement,))


def differences(old: Plan, new: Plan) -> list[str]:
    """Return the options by which two plans differ."""
    options = {
        "tasks": "--tasks",
        "samples": "-n",
        "agent": "--command or --python",
        "judge": "--judge, --judge-python or --answer",
        "split": "--split",
        "policies": "--policy or --every-version",
        "hidden": "--hide",
    }
    return [name for field, name in options.items() if getattr(old, field) != getattr(new, field)]


def encoded(lines: Iterable[Line]) -> bytes:
    """Return lines as the journal holds them."""
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
