"""Read back from a journal's lines what a rollout has done (pure).

A run is begun, ended and told, in this order, each a line. One that was begun and has no end was
under way when the runner was killed: that attempt is abandoned, and the run is made again as
another episode. What ended and was not told is told again, under the same idempotency key.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple

import msgspec

from pawl.rollout.errors import RolloutError
from store.records import Record, Split

Statement = dict[str, Any]
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


class Past(NamedTuple):
    """Hold what the journal says: its plan, the settled runs, and what is still to be told."""

    plan: Plan | None
    settled: dict[Key, Finished]
    untold: list[Finished]
    under_way: list[Begun]
    told: int
    size: int


def replay(data: bytes, file: str, *, again: bool = False) -> Past:
    """Return what a journal says.

    A last line without its newline was being written at a kill, and counts for nothing.

    Args:
        data: the journal's content.
        file: its name, for messages.
        again: runs that failed, or that the judge failed on, count as not done.

    Raises:
        RolloutError: it is no journal.
    """
    begun: dict[str, Begun] = {}
    finished: dict[str, Finished] = {}
    told: set[str] = set()
    plan: Plan | None = None
    size = data.rfind(b"\n") + 1
    if not size and not (data.startswith(BEGINNING) or BEGINNING.startswith(data)):
        raise RolloutError(f"--journal: {file} is no journal of a rollout; name another file")
    for line in _lines(data[:size], file):
        match line:
            case Plan():
                plan = plan or line
            case Begun():
                begun[line.episode] = line
            case Finished():
                finished[line.episode] = line
            case Told():
                told.add(line.episode)
    kept = ("done",) if again else ("done", "failed", "unjudged")
    settled = {
        begun[episode].key: ended
        for episode, ended in finished.items()
        if episode in begun and ended.outcome in kept
    }
    untold = [e for e in finished.values() if e.statements and e.episode not in told]
    under_way = [line for episode, line in begun.items() if episode not in finished]
    return Past(plan, settled, untold, under_way, len(told), size)


def _lines(data: bytes, file: str) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    for number, text in enumerate(data.splitlines(), start=1):
        try:
            line: Line = decoder.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RolloutError(
                f"--journal: line {number} of {file} is no line of a rollout's journal "
                f"({error}); name another file"
            ) from error
        if number == 1 and not isinstance(line, Plan):
            raise RolloutError(f"--journal: {file} begins with no plan; name another file")
        yield line


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
    }
    return [name for field, name in options.items() if getattr(old, field) != getattr(new, field)]


def encoded(lines: Iterable[Line]) -> bytes:
    """Return lines as the journal holds them."""
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
