"""The journal: wherever a rollout is killed, no run is lost and none counts twice."""

import asyncio
import resource
import tracemalloc
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.rollout.errors import RolloutError
from pawl.rollout.journal import (
    Begun,
    Finished,
    Key,
    Line,
    Past,
    Plan,
    Told,
    abandoned,
    differences,
    encoded,
    replay,
)
from pawl.rollout.journal_file import JournalFile

PLAN = Plan(tasks="0", samples=2, agent="a", judge="", split=None, policies=("",))
KEYS = [Key("", task, sample) for task in ("t1", "t2", "t3") for sample in (0, 1)]


def read(data: bytes, *, again: bool = False) -> Past:
    return replay(data.splitlines(keepends=True), "j", again=again)


class Launch:
    """A runner in miniature: several lanes, each step of which appends one line."""

    def __init__(self, data: bytes, number: int) -> None:
        self.past = read(data)
        self.data = data[: self.past.size]
        self.told: list[str] = []
        self.episode = f"e{number}"
        if self.past.plan is None:
            self.write(PLAN)
        for begun in self.past.under_way:
            self.write(abandoned(begun.episode))
        again = [abandoned(begun.episode) for begun in self.past.under_way]
        self.steps: list[list[Line]] = [
            [Told(episode=one.episode)] for one in (*self.past.untold, *again)
        ]
        for number_of_key, key in enumerate(KEYS):
            if key not in self.past.settled:
                self.steps.append(attempt(f"{self.episode}-{number_of_key}", key))

    def write(self, line: Line) -> None:
        self.data += encoded([line])

    def step(self, lane: int) -> None:
        steps = self.steps[lane % len(self.steps)]
        line = steps.pop(0)
        if isinstance(line, Told):
            self.told.append(line.episode)
        self.write(line)
        self.steps = [left for left in self.steps if left]


def attempt(episode: str, key: Key) -> list[Line]:
    statement = {"metric": "reward", "value": 1.0, "episode": episode}
    finished = Finished(episode=episode, outcome="done", statements=(statement,))
    return [Begun(episode=episode, key=key), finished, Told(episode=episode)]


@given(st.lists(st.tuples(st.lists(st.integers(0, 20)), st.integers(0, 40)), max_size=6))
def test_whenever_it_is_killed_each_run_counts_once(
    launches: list[tuple[list[int], int]],
) -> None:
    """Each launch takes some steps and loses the bytes that were being written at its end."""
    data, told = b"", Counter[str]()
    for number, (lanes, cut) in enumerate((*launches, ([], 0))):
        launch = Launch(data, number)
        is_last = number == len(launches)
        for lane in lanes:
            if launch.steps:
                launch.step(lane)
        while is_last and launch.steps:
            launch.step(0)
        told.update(launch.told)
        last = launch.data.rfind(b"\n", 0, len(launch.data) - 1) + 1
        data = launch.data[: max(last, len(launch.data) - cut)] if not is_last else launch.data
    past = read(data)
    assert set(past.settled) == set(KEYS)
    assert past.under_way == []
    assert past.untold == []
    counted = settled_runs(data)
    assert counted.keys() == set(KEYS)
    assert set(counted.values()) <= set(told)
    assert len(set(counted.values())) == len(KEYS)


def settled_runs(data: bytes) -> dict[Key, str]:
    """The episode by which each run is settled, as the lines say."""
    lines = [msgspec.json.decode(text, type=Line) for text in data.splitlines()]
    keys = {line.episode: line.key for line in lines if isinstance(line, Begun)}
    return {
        keys[line.episode]: line.episode
        for line in lines
        if isinstance(line, Finished) and line.outcome != "abandoned"
    }


@given(st.integers(0, 2000))
def test_a_journal_that_is_cut_anywhere_is_read(cut: int) -> None:
    whole = encoded([PLAN, *attempt("e1", KEYS[0]), *attempt("e2", KEYS[1])])
    past = read(whole[:cut])
    assert past.size <= cut
    assert len(past.settled) + len(past.under_way) <= 2


def test_what_failed_is_done_again_only_if_that_is_wanted() -> None:
    statement = {"metric": "run_failed", "value": 1, "episode": "e1"}
    failed = Finished(episode="e1", outcome="failed", statements=(statement,))
    data = encoded([PLAN, Begun(episode="e1", key=KEYS[0]), failed, Told(episode="e1")])
    assert set(read(data).settled) == {KEYS[0]}
    assert read(data, again=True).settled == {}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"id": "t1"}\n', "line 1 of j is no line"),
        (b"\n", "line 1 of j is no line"),
        (encoded([Told(episode="e")]), "begins with no plan"),
        (encoded([PLAN]) + b"{}\n", "line 2 of j is no line"),
        (b"a note without a line's end", "j is no journal of a rollout; name another file"),
        (b'{"line":"plank', "j is no journal of a rollout; name another file"),
    ],
)
def test_another_file_is_no_journal(data: bytes, said: str) -> None:
    with pytest.raises(RolloutError, match=said):
        read(data)


def test_differing_plans_are_told_by_their_options() -> None:
    other = msgspec.structs.replace(PLAN, samples=3, split="eval")
    assert differences(PLAN, other) == ["-n", "--split"]
    assert differences(PLAN, PLAN) == []
    assert differences(PLAN, msgspec.structs.replace(PLAN, hidden=("gold",))) == ["--hide"]


def test_a_plan_from_before_fields_could_be_hidden_hides_none() -> None:
    """Its journal goes on."""
    old = encoded([PLAN]).replace(b',"hidden":[]', b"")
    assert old != encoded([PLAN])
    assert read(old).plan == PLAN


async def test_a_torn_line_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(encoded([PLAN, Begun(episode="e1", key=KEYS[0])]) + b'{"line":"en')
    journal = JournalFile(path)
    past = journal.open_plan(PLAN)
    assert [begun.episode for begun in past.under_way] == ["e1"]
    journal.append(abandoned("e1"))
    await asyncio.gather(journal.synced(), journal.synced())
    journal.close()
    assert read(path.read_bytes()).under_way == []


def test_a_file_of_somebody_else_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("to do")
    journal = JournalFile(path)
    with pytest.raises(RolloutError, match="is no journal"):
        journal.plan()
    with pytest.raises(RolloutError, match="is no journal"):
        journal.open_plan(PLAN)
    journal.close()
    assert path.read_text() == "to do"


@pytest.mark.parametrize("size", [0, 1, 10, 50])
def test_a_journal_that_was_killed_in_its_first_line_begins_anew(tmp_path: Path, size: int) -> None:
    path = tmp_path / "j"
    path.write_bytes(encoded([PLAN])[:size])
    journal = JournalFile(path)
    assert journal.open_plan(PLAN).plan is None
    journal.close()
    assert path.read_bytes() == encoded([PLAN])


def test_nobody_else_reads_a_journal(tmp_path: Path) -> None:
    JournalFile(tmp_path / "j").close()
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_leaves_a_journal_that_is_read(tmp_path: Path) -> None:
    """What was written in part is taken back, and nothing comes after it."""
    path = tmp_path / "j"
    journal = JournalFile(path)
    journal.open_plan(PLAN)
    whole = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, limits[1]))
    try:
        with pytest.raises(RolloutError, match=r"cannot be written .*; free space, and start"):
            journal.append(Begun(episode="e1", key=KEYS[0]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(RolloutError, match="cannot be written"):
        journal.append(Begun(episode="e2", key=KEYS[0]))
    journal.close()
    assert path.read_bytes() == whole


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = JournalFile(path)
    with pytest.raises(RolloutError, match="another pawl rollout is writing"):
        JournalFile(path)
    journal.close()
    JournalFile(path).close()


def test_another_plan_is_refused(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path / "j")
    journal.open_plan(PLAN)
    with pytest.raises(RolloutError, match="another --command or --python: name another file"):
        journal.open_plan(msgspec.structs.replace(PLAN, agent="b"))
    journal.close()


def test_of_a_long_journal_little_is_kept(tmp_path: Path) -> None:
    """Neither the outputs, nor what was told; of what is untold the statements alone."""
    path, runs = tmp_path / "j", 2000
    with path.open("wb") as file:
        file.write(encoded([PLAN]))
        for number in range(runs):
            begun, finished, told = attempt(f"e{number}", Key("", f"t{number}", 0))
            assert isinstance(finished, Finished)
            long = msgspec.structs.replace(finished, output="x" * 10_000, errors="y" * 2_000)
            file.write(encoded([begun, long, told] if number else [begun, long]))
    journal = JournalFile(path)
    tracemalloc.start()
    try:
        assert journal.plan() == PLAN
        assert tracemalloc.get_traced_memory()[1] < 100_000
        past = journal.open_plan(PLAN)
        assert tracemalloc.get_traced_memory()[1] < 1000 * runs
    finally:
        tracemalloc.stop()
        journal.close()
    assert len(past.settled) == runs
    assert past.settled[Key("", "t7", 0)].metrics == {"reward": 1.0}
    [untold] = past.untold
    assert (untold.episode, untold.output, untold.errors) == ("e0", "", "")
    assert untold.statements == ({"metric": "reward", "value": 1.0, "episode": "e0"},)


def test_the_plan_is_read_of_the_first_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(encoded([PLAN]) + b"no line\n")
    journal = JournalFile(path)
    assert journal.plan() == PLAN
    with pytest.raises(RolloutError, match="line 2 of"):
        journal.open_plan(PLAN)
    journal.close()
