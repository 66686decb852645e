"""The report of a run: picture, page and summary, of one policy or of several."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pawl.scenarios.agent import Ran
from pawl.scenarios.places import find_scenario
from pawl.scenarios.progress import HeldOut, Progress, Wave, render
from pawl.scenarios.report import closing_words, write_report
from store.ids import new_id
from store.records import UpdateRow

SUMMARY: dict[str, Any] = {
    "before": 0.25,
    "after": 0.75,
    "seconds": 600.0,
    "updates": 2,
    "calls": 10,
    "recorded": 10,
    "failed_requests": 0,
    "seed": 7,
}


def update(policy: str, version: int, reward: float) -> UpdateRow:
    now = datetime.now(UTC)
    return UpdateRow(
        id=new_id(),
        policy=policy,
        parent_version=version - 1,
        version=version,
        state="done",
        claimed_at=now,
        finished_at=now,
        metrics={"reward_mean": reward},
    )


def progress(*updates: UpdateRow) -> Progress:
    ran = Ran(task="t", sample=0, value="text", error=None, metrics={"reward": 0.5})
    return Progress(
        title="A title",
        policy="writer",
        held_out=[
            HeldOut(waves=0, updates=0, score=0.25),
            HeldOut(waves=1, updates=1, score=0.75),
        ],
        waves=[Wave(1, 0, 1, "reward", [ran])],
        updates=updates,
    )


@pytest.mark.parametrize("name", ["calculator", "sql"])
def test_a_report_is_three_files(name: str, tmp_path: Path) -> None:
    scenario = find_scenario(name)
    seen = progress(update("rewriter", 1, 0.1), update("writer", 1, 0.4))
    write_report(scenario, tmp_path, SUMMARY, seen)
    assert json.loads((tmp_path / "summary.json").read_text()) == SUMMARY
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert scenario.title in page
    assert "<th>policy</th>" in page
    assert "75%" in page


def test_one_policy_needs_no_column(tmp_path: Path) -> None:
    write_report(find_scenario("math"), tmp_path, SUMMARY, progress(update("writer", 1, 0.4)))
    assert "<th>policy</th>" not in (tmp_path / "report.html").read_text()


def test_a_waves_reward_is_that_of_the_leading_policys_update() -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(render(progress(update("rewriter", 1, 0.1), update("writer", 1, 0.4))))
        shown = console.export_text()
    assert "A title" in shown
    assert "0.40" in shown
    assert "0.10" not in shown


def test_last_words_say_what_rose() -> None:
    words = closing_words("reward", SUMMARY, Path("var/x"), Path("var/x/data"), "writer")
    assert "Held-out reward went from [bold]25%[/] to [bold]75%[/] in 2 updates" in words
