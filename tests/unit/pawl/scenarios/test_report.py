"""The report of a run: picture, page and summary, of one policy or of several."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pawl.scenarios.agent import Ran
from pawl.scenarios.ledger import VersionRewards
from pawl.scenarios.progress import HeldOut, Progress, Wave, render
from pawl.scenarios.report import closing_words, labelled_looks, write_report
from pawl.scenarios.scenario import find_scenario
from store.ids import new_id
from store.records import UpdateRow

SUMMARY: dict[str, Any] = {
    "before": 0.25,
    "after": 0.75,
    "best": 0.75,
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
    write_report(scenario, tmp_path, SUMMARY, seen, {"m": []})
    assert json.loads((tmp_path / "summary.json").read_text()) == SUMMARY
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert scenario.title in page
    assert "<th>policy</th>" in page
    assert "75%" in page


def test_one_policy_needs_no_column(tmp_path: Path) -> None:
    seen = progress(update("writer", 1, 0.4))
    write_report(find_scenario("math"), tmp_path, SUMMARY, seen, {"math": []})
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


def test_last_words_say_what_was_best_where_it_was_not_the_last() -> None:
    fallen = SUMMARY | {"best": 0.8}
    words = closing_words("reward", fallen, Path("var/x"), Path("var/x/data"), "writer")
    assert "to [bold]75%[/] (best 80%) in 2 updates" in words


def size(picture: Path) -> tuple[int, int]:
    header = picture.read_bytes()[16:24]
    return int.from_bytes(header[:4]), int.from_bytes(header[4:])


def test_several_policies_have_each_a_curve_in_the_picture(tmp_path: Path) -> None:
    seen, scenario = progress(update("writer", 1, 0.4)), find_scenario("sql")
    writer = [
        VersionRewards(version=0, reward=0.3, episodes=8, held_out=0.25, held_out_episodes=8),
        VersionRewards(version=1, reward=0.5, episodes=8),
    ]
    write_report(scenario, tmp_path / "one", SUMMARY, seen, {"writer": writer})
    write_report(scenario, tmp_path / "two", SUMMARY, seen, {"writer": writer, "rewriter": []})
    one, two = (size(tmp_path / name / "reward.png") for name in ("one", "two"))
    assert one[0] == two[0]
    assert one[1] < two[1]


def test_the_picture_names_the_first_the_best_and_the_last_look() -> None:
    seen = progress()
    seen.held_out = [
        HeldOut(waves=wave, updates=wave, score=score)
        for wave, score in enumerate([0.9, 0.5, 0.8, 0.7, 0.6])
    ]
    assert seen.best == seen.held_out[2]
    assert [look.waves for look in labelled_looks(seen)] == [0, 4, 2]
    seen.held_out = seen.held_out[:1]
    assert seen.best is None
    assert [look.waves for look in labelled_looks(seen)] == [0]
