"""What `pawl rollout` shows, on a terminal and elsewhere, of a rollout whose progress is known."""

import asyncio
import io
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from pawl.rollout import display
from pawl.rollout.desk import Desk
from pawl.rollout.display import Display
from pawl.rollout.figures import Figures
from pawl.rollout.journal import Finished, Outcome, outline
from pawl.rollout.proxy_view import ProxyView
from tests.support.waiting import until

# What moves the cursor, and what hides and shows it.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
NOTHING_YET = """\
runs  under way  success  reward  calls/s  serving  seconds
0/20  4          –        –       –        –        0
  wave    version    runs    success    reward
"""
UNDER_WAY = """\
runs  under way  success  reward  calls/s  serving  seconds
9/20  4          67%      1.167   12.3     m@3      61
  wave     version    runs    success    reward
     1         m@1       2       100%     0.500    ━━━━━━━━━━━━
     2    m@1, m@2       2        50%     1.000    ━━━━━━━━━━━━━━━━━━━━━━━━
     3         m@2       2       100%     1.000    ━━━━━━━━━━━━━━━━━━━━━━━━
     4         m@2       2         0%         –
     5         m@3       1       100%     3.000
  errors    kind
       2    time limit
       1    exit status 3
"""


def run(version: str, reward: float | None = None, error: str | None = None) -> Finished:
    said = () if reward is None else ({"metric": "reward", "value": reward, "episode": "e"},)
    outcome: Outcome = "failed" if error else "done"
    return Finished(episode="e", outcome=outcome, error=error, version=version, statements=said)


RUNS = (
    *(run("m@1", 0.0), run("m@1", 1.0)),
    *(run("m@1", 1.0), run("m@2", error="time limit")),
    *(run("m@2", 1.0), run("m@2", 1.0)),
    *(run("m@2", error="exit status 3"), run("m@2", error="time limit")),
    run("m@3", 3.0),
)


class Shown:
    """The display of a rollout of twenty runs, and what is written of it, 80 columns wide."""

    def __init__(self, *, terminal: bool) -> None:
        self.seconds = 0.0
        self.rollout = SimpleNamespace(figures=Figures(20), stopping=False, under_way=4)
        self.view = ProxyView(cast(Any, None), "", "")
        self.desk = Desk(cast(Any, None), "")
        self.written = io.StringIO()
        self.console = Console(
            file=self.written, width=80, height=40, force_terminal=terminal, color_system=None
        )

    @asynccontextmanager
    async def showing(self) -> AsyncIterator[None]:
        """Show it meanwhile."""
        one = Display(cast(Any, self.rollout), self.view, self.desk, self.console)
        task = asyncio.create_task(one.show())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def progress(self) -> None:
        """Be a minute on, with nine runs."""
        self.seconds = 61.0
        self.view.calls_a_second = 12.34
        self.view.serving = {"m": "m@3"}
        for one in RUNS:
            self.rollout.figures.add("", outline(one))

    @property
    def text(self) -> str:
        """All that was written, each line without the spaces at its end."""
        lines = CONTROL.sub("", self.written.getvalue()).replace("\r", "\n").splitlines()
        return "".join(line.rstrip() + "\n" for line in lines if line.strip())

    @property
    def last(self) -> str:
        """What stands on the terminal now."""
        return self.text[self.text.rindex("runs  under way") :]


@pytest.fixture
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What is shown on a terminal, or where there is none (`indirect` says which), in no time."""
    made = Shown(terminal=getattr(request, "param", True))
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: made.seconds))
    monkeypatch.setattr(display, "REFRESH_S", 0.01)
    monkeypatch.setattr(display, "LINE_S", 0.01)
    return made


async def test_a_terminal_shows_how_far_it_is_and_follows(shown: Shown) -> None:
    async with shown.showing():
        await until(lambda: shown.written.getvalue() != "")
        assert shown.last == NOTHING_YET
        shown.progress()
        await until(lambda: "9/20" in shown.text)
    assert shown.last == UNDER_WAY


async def test_what_came_last_stands_there_in_the_end(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "REFRESH_S", 600.0)
    async with shown.showing():
        await asyncio.sleep(0)
        shown.progress()
    assert shown.last == UNDER_WAY


async def test_a_terminal_says_what_it_waits_for(shown: Shown) -> None:
    shown.rollout.stopping = True
    async with shown.showing():
        await until(lambda: "stopping: 4 runs under way (Ctrl-C gives them up)" in shown.text)
        shown.desk.away = "503 Service Unavailable"
        await until(lambda: "feedback waits: 503 Service Unavailable" in shown.text)
    assert "stopping" not in shown.last


@pytest.mark.parametrize("shown", [False], indirect=True)
async def test_elsewhere_there_are_lines(shown: Shown) -> None:
    async with shown.showing():
        shown.progress()
        await until(lambda: "\n" in shown.written.getvalue())
        shown.desk.away = "503"
        await until(lambda: "feedback waits" in shown.written.getvalue())
    first, *_, last = shown.written.getvalue().splitlines()
    assert first == "  61.0 s  9/20 runs  3 failed  reward 1.167"
    assert last == f"{first}  feedback waits: 503"
    assert "\x1b" not in shown.written.getvalue()
