"""How the calls of a framework are counted, when it misses the bar, and what is shown."""

import json
import runpy
import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.trainable.__main__ import write
from benchmarks.trainable.rows import PROGRAMS, ROWS
from benchmarks.trainable.shares import ASKED, Found, count, reasons_table, shares_table
from store.records import Episode, TransitionRow
from tests.support.stored import episode, transition


def call(reason: str | None = None, **changes: Any) -> TransitionRow:
    """A call of the framework `k`."""
    return transition(**{"agent": "k", "trainable": reason is None, "reason": reason} | changes)


def made(calls: tuple[TransitionRow, ...], quarantined: str | None = None) -> Episode:
    return msgspec.structs.replace(episode(None), calls=calls, quarantined_reason=quarantined)


def counted(*episodes: Episode, failures: Mapping[str, int] | None = None) -> Found:
    return count("k", "a client", episodes, failures or {})


def found(trainable: int, calls: int, episodes: int = ASKED) -> Found:
    return Found(
        key="k",
        title="a client",
        calls=calls,
        episodes=episodes,
        trainable=trainable,
        reasons={},
    )


def cells(table: Table) -> list[list[str]]:
    """The cells of a table's rows, as they are shown."""
    out = StringIO()
    Console(file=out, width=120).print(table)
    shown = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in shown]


def test_calls_are_counted_by_why_they_cannot_be_trained() -> None:
    one = made((call(), call("greedy"), call("constrained_sampling")))
    other = made((call(), call("constrained_sampling")))
    assert counted(one, other) == Found(
        key="k",
        title="a client",
        calls=5,
        episodes=2,
        trainable=2,
        reasons={"constrained_sampling": 2, "greedy": 1},
    )


@pytest.mark.parametrize(("reason", "status"), [("incomplete", None), ("error_reply", 400)])
def test_a_call_that_failed_counts_as_one_that_cannot_be_trained(
    reason: str, status: int | None
) -> None:
    seen = counted(made((call(), call(reason, http_status=status))))
    assert (seen.calls, seen.trainable, seen.reasons) == (2, 1, {reason: 1})


def test_calls_of_others_do_not_count() -> None:
    calls = call(), call(agent="another"), call("greedy", agent="another")
    seen = counted(made(calls), made((call(agent="another"),)))
    assert (seen.calls, seen.episodes, seen.reasons) == (1, 1, {})


def test_a_quarantined_episode_trains_none_of_its_calls() -> None:
    calls = call(), call("greedy")
    seen = counted(made(calls, "doubtful"))
    assert (seen.trainable, seen.reasons) == (0, {"doubtful": 1, "greedy": 1})


@pytest.mark.parametrize(
    ("trainable", "calls", "missed"),
    [(20, 20, False), (19, 20, False), (18, 20, True), (0, 3, True), (0, 0, True)],
)
def test_a_row_under_95_percent_or_without_calls_misses_the_bar(
    trainable: int, calls: int, missed: bool
) -> None:
    assert found(trainable, calls).missed is missed


@pytest.mark.parametrize(
    ("calls", "episodes", "missed"),
    [(1, 1, True), (19, 20, True), (40, 19, True), (20, 20, False), (60, 20, False)],
)
def test_a_program_that_did_not_ask_all_its_questions_misses_the_bar(
    calls: int, episodes: int, missed: bool
) -> None:
    assert found(calls, calls, episodes).missed is missed


def test_one_table_has_the_shares_and_another_the_reasons() -> None:
    calls = call(), call("greedy"), call("greedy"), call("error_reply", http_status=500)
    seen = [counted(made(calls), failures={"ParseError: [/late]": 3})]
    assert cells(shares_table(seen)) == [["a client", "1", "4", "1", "25.0%", "3"]]
    assert cells(reasons_table(seen)) == [
        ["a client", "greedy", "2"],
        ["a client", "error_reply", "1"],
        ["a client", "ParseError: [/late]", "3"],
    ]


def test_a_share_just_under_the_bar_is_not_shown_as_reaching_it() -> None:
    [[*_, share, _]] = cells(shares_table([found(947, 1000)]))
    assert share == "94.7%"


def test_the_figures_are_written_with_their_shares(tmp_path: Path) -> None:
    write([found(1, 4)], tmp_path / "figures.json")
    [row] = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert (row["key"], row["trainable"], row["calls"], row["share"]) == ("k", 1, 4, 0.25)
    assert (row["episodes"], row["missed"]) == (20, True)


def test_each_row_has_a_name_of_its_own_and_a_program() -> None:
    assert len({row.key for row in ROWS}) == len({row.title for row in ROWS}) == len(ROWS)
    assert all((PROGRAMS / row.program).is_file() for row in ROWS)


def test_no_two_rows_ask_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sent a conversation without a name is told by its words alone."""
    asked = []
    for number in range(len(ROWS)):
        monkeypatch.setattr(sys, "argv", ["program", str(number)])
        asked += runpy.run_path(str(PROGRAMS / "task.py"))["QUESTIONS"]
    assert len(set(asked)) == len(asked) == ASKED * len(ROWS)
