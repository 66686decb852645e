"""The figures of a rollout, and how they are shown on a terminal and elsewhere."""

import asyncio
import io
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pawl.commands import rollout as display
from pawl.commands.rollout import Display
from pawl.rollout.journal import Ended, Outcome
from pawl.rollout.running import RunCounts
from tests.support.waiting import until

# What moves the cursor, and what hides and shows it.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
UNDER_WAY = """\
 runs  under way  failed  reward  seconds
 4/20  4          2       0.750   61
     1  time limit
     1  exit status 3
"""


def run(outcome: Outcome, reward: float | None = None, error: str | None = None) -> Ended:
    stated = () if reward is None else ({"metric": "reward", "value": reward, "episode": "e"},)
    return Ended(episode="e", outcome=outcome, error=error, statements=stated)


REWARDS = st.integers(0, 64).map(lambda part: part / 64)


@given(st.lists(st.builds(run, st.sampled_from(get_args(Outcome)), st.none() | REWARDS)))
def test_every_settled_run_counts_once(runs: list[Ended]) -> None:
    figures = RunCounts(60)
    for ended in runs:
        figures.add(ended)
    settled = [ended for ended in runs if ended.outcome != "abandoned"]
    rewards = [
        one.statements[0]["value"] for one in runs if one.statements and one.outcome == "done"
    ]
    summary = figures.summary()
    assert summary["runs"] == len(settled)
    assert summary["abandoned"] == len(runs) - len(settled)
    assert figures.reward is None or min(rewards) <= figures.reward <= max(rewards)


@pytest.mark.parametrize(("second", "is_binary"), [(1.0, True), (0.5, False)])
def test_interval_is_wilsons_for_binary_rewards_and_students_else(
    second: float, is_binary: bool
) -> None:
    figures = RunCounts(2)
    figures.add(run("done", 1.0))
    figures.add(run("done", second))
    assert (figures.summary()["high"] == 1.0) == is_binary


def test_counts_without_a_run_have_no_mean() -> None:
    summary = RunCounts(3).summary()
    assert (summary["reward"], summary["low"], summary["high"]) == (None, None, None)


class Shown:
    """The display of a rollout of twenty runs, and what is written of it, 80 columns wide."""

    def __init__(self, *, terminal: bool) -> None:
        self.seconds = 0.0
        self.rollout = SimpleNamespace(figures=RunCounts(20), trouble="", under_way=4)
        self.written = io.StringIO()
        self.console = Console(
            file=self.written, width=80, height=40, force_terminal=terminal, color_system=None
        )

    @asynccontextmanager
    async def showing(self) -> AsyncIterator[None]:
        """Show it meanwhile."""
        task = asyncio.create_task(Display(cast(Any, self.rollout), self.console).show())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def progress(self) -> None:
        """Be a minute on, with four runs."""
        self.seconds = 61.0
        for ended in (
            run("done", 0.5),
            run("done", 1.0),
            run("failed", error="time limit"),
            run("failed", error="exit status 3"),
        ):
            self.rollout.figures.add(ended)

    @property
    def last(self) -> str:
        """What stands on the terminal now, each line without the spaces at its end."""
        lines = CONTROL.sub("", self.written.getvalue()).replace("\r", "\n").splitlines()
        text = "".join(line.rstrip() + "\n" for line in lines if line.strip())
        return text[text.rindex(" runs  under way") :]


@pytest.fixture
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What is shown on a terminal, or where there is none (`indirect` says which), in no time."""
    made = Shown(terminal=getattr(request, "param", True))
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: made.seconds))
    monkeypatch.setattr(display, "REFRESH_S", 0.01)
    monkeypatch.setattr(display, "LINE_S", 0.01)
    return made


async def test_terminal_follows_the_progress_and_trouble_of_a_rollout(shown: Shown) -> None:
    async with shown.showing():
        await until(lambda: "0/20" in shown.written.getvalue())
        shown.progress()
        await until(lambda: "4/20" in shown.written.getvalue())
        assert shown.last == UNDER_WAY
        shown.rollout.trouble = "feedback waits: 503 Service Unavailable"
        await until(lambda: shown.rollout.trouble in shown.written.getvalue())


@pytest.mark.parametrize("shown", [False], indirect=True)
async def test_rollouts_progress_is_written_as_plain_lines_without_a_terminal(shown: Shown) -> None:
    async with shown.showing():
        shown.progress()
        await until(lambda: "\n" in shown.written.getvalue())
        shown.rollout.trouble = "feedback waits: 503"
        await until(lambda: "feedback waits" in shown.written.getvalue())
    first, *_, last = shown.written.getvalue().splitlines()
    assert first == "runs 4/20  under way 4  failed 2  reward 0.750  seconds 61"
    assert last == f"{first}  feedback waits: 503"
    assert "\x1b" not in shown.written.getvalue()
