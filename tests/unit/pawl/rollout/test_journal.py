"""The journal: wherever a rollout is killed, no run is lost and none counts twice."""

import asyncio
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.rollout.journal import (
    Begun,
    Ended,
    Journal,
    JournalContent,
    Line,
    Posted,
    RolloutPlan,
    RunKey,
    read_journal,
)
from pawl.rollout.tasks import RolloutError

PLAN = RolloutPlan(tasks="0", samples=2, agent="a", judge="", split=None, policy="")
KEYS = [RunKey(task, sample) for task in ("t1", "t2", "t3") for sample in (0, 1)]


def encoded(lines: Iterable[Line]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def abandoned(episode: str) -> Ended:
    statement = {"metric": "run_abandoned", "value": 1, "episode": episode}
    return Ended(episode=episode, outcome="abandoned", statements=(statement,))


def read(data: bytes) -> JournalContent:
    return read_journal(data.splitlines(keepends=True), "j", again=False)


class Launch:
    """A runner in miniature: several lanes, each step of which appends one line."""

    def __init__(self, data: bytes, number: int) -> None:
        self.past = read(data)
        self.data = data[: self.past.size]
        self.posted: list[str] = []
        self.episode = f"e{number}"
        if self.past.plan is None:
            self.write(PLAN)
        for begun in self.past.under_way:
            self.write(abandoned(begun.episode))
        again = [abandoned(begun.episode) for begun in self.past.under_way]
        self.steps: list[list[Line]] = [
            [Posted(episode=one.episode)] for one in (*self.past.unposted, *again)
        ]
        for number_of_key, key in enumerate(KEYS):
            if key not in self.past.settled:
                self.steps.append(attempt(f"{self.episode}-{number_of_key}", key))

    def write(self, line: Line) -> None:
        self.data += encoded([line])

    def step(self, lane: int) -> None:
        steps = self.steps[lane % len(self.steps)]
        line = steps.pop(0)
        if isinstance(line, Posted):
            self.posted.append(line.episode)
        self.write(line)
        self.steps = [left for left in self.steps if left]


def attempt(episode: str, key: RunKey) -> list[Line]:
    statement = {"metric": "reward", "value": 1.0, "episode": episode}
    finished = Ended(episode=episode, outcome="done", statements=(statement,))
    return [Begun(episode=episode, key=key), finished, Posted(episode=episode)]


@given(st.lists(st.tuples(st.lists(st.integers(0, 20)), st.integers(0, 40)), max_size=6))
def test_each_run_counts_once_whenever_the_runner_is_killed(
    launches: list[tuple[list[int], int]],
) -> None:
    """Each launch takes some steps and loses the bytes that were being written at its end."""
    data, posted = b"", Counter[str]()
    for number, (lanes, cut) in enumerate((*launches, ([], 0))):
        launch = Launch(data, number)
        is_last = number == len(launches)
        for lane in lanes:
            if launch.steps:
                launch.step(lane)
        while is_last and launch.steps:
            launch.step(0)
        posted.update(launch.posted)
        last = launch.data.rfind(b"\n", 0, len(launch.data) - 1) + 1
        data = launch.data[: max(last, len(launch.data) - cut)] if not is_last else launch.data
    past = read(data)
    assert set(past.settled) == set(KEYS)
    assert past.under_way == []
    assert past.unposted == []
    counted = settled_runs(data)
    assert counted.keys() == set(KEYS)
    assert set(counted.values()) <= set(posted)
    assert len(set(counted.values())) == len(KEYS)


def settled_runs(data: bytes) -> dict[RunKey, str]:
    """The episode by which each run is settled, as the lines say."""
    lines = [msgspec.json.decode(text, type=Line) for text in data.splitlines()]
    keys = {line.episode: line.key for line in lines if isinstance(line, Begun)}
    return {
        keys[line.episode]: line.episode
        for line in lines
        if isinstance(line, Ended) and line.outcome != "abandoned"
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"id": "t1"}\n', "line 1 of j is no line"),
        (b"\n", "line 1 of j is no line"),
        (encoded([Posted(episode="e")]), "begins with no plan"),
        (encoded([PLAN]) + b"{}\n", "line 2 of j is no line"),
        (b"a note without a line's end", "j is no journal of a rollout; name another"),
        (b'{"line":"plank', "j is no journal of a rollout; name another"),
    ],
)
def test_content_that_is_no_rollout_journal_is_refused_with_the_reason(
    data: bytes, message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        read(data)


def test_torn_last_line_of_a_rollout_journal_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(encoded([PLAN, Begun(episode="e1", key=KEYS[0])]) + b'{"line":"en')
    journal = Journal(path)
    journal.begin(PLAN)
    assert [begun.episode for begun in journal.past.under_way] == ["e1"]
    journal.append(abandoned("e1"))
    asyncio.run(journal.sync())
    journal.close()
    assert read(path.read_bytes()).under_way == []


def test_file_that_is_no_rollout_journal_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("to do")
    with pytest.raises(RolloutError, match="is no journal"):
        Journal(path)
    assert path.read_text() == "to do"


@pytest.mark.parametrize("size", [0, 1, 10, 50])
def test_rollout_journal_torn_in_its_first_line_begins_anew(tmp_path: Path, size: int) -> None:
    path = tmp_path / "j"
    path.write_bytes(encoded([PLAN])[:size])
    journal = Journal(path)
    assert journal.past.plan is None
    journal.begin(PLAN)
    journal.close()
    assert path.read_bytes() == encoded([PLAN])


def test_rollout_journal_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    Journal(tmp_path / "j").close()
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600


def test_full_disk_leaves_no_torn_line_in_a_rollout_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    journal.begin(PLAN)
    whole = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, limits[1]))
    try:
        with pytest.raises(RolloutError, match=r"cannot be written .*; free space, and start"):
            journal.append(Begun(episode="e1", key=KEYS[0]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == whole
    journal.append(Begun(episode="e2", key=KEYS[0]))
    journal.close()
    assert [begun.episode for begun in read(path.read_bytes()).under_way] == ["e2"]


def test_second_writer_of_a_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    with pytest.raises(RolloutError, match="another pawl rollout is writing"):
        Journal(path)
    journal.close()
    Journal(path).close()


# Prints the most memory, in bytes, that Python's objects took while a journal was read.
PEAK = """
import sys, tracemalloc
from pathlib import Path
from pawl.rollout.journal import Journal
tracemalloc.start()
Journal(Path(sys.argv[1])).close()
print(tracemalloc.get_traced_memory()[1])
"""


def test_run_outputs_of_a_long_rollout_journal_are_not_kept_in_memory(tmp_path: Path) -> None:
    path, runs = tmp_path / "j", 2000
    with path.open("wb") as file:
        file.write(encoded([PLAN]))
        for number in range(runs):
            begun, ended, posted = attempt(f"e{number}", RunKey(f"t{number}", 0))
            assert isinstance(ended, Ended)
            long = msgspec.structs.replace(ended, output="x" * 10_000, errors="y" * 2_000)
            file.write(encoded([begun, long, posted] if number else [begun, long]))
    # In a process of its own, as other tests' threads may still allocate in this one.
    child = subprocess.run(
        [sys.executable, "-c", PEAK, str(path)], check=True, capture_output=True, text=True
    )
    assert int(child.stdout) < 2000 * runs
    journal = Journal(path)
    journal.close()
    assert len(journal.past.settled) == runs
    [unposted] = journal.past.unposted
    assert (unposted.episode, unposted.output, unposted.errors) == ("e0", "", "")
    assert unposted.statements == ({"metric": "reward", "value": 1.0, "episode": "e0"},)
