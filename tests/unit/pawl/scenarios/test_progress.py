"""The figures of a scenario's run: what is counted, when its waves end, and what is reported."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pawl.scenarios.agent import RunResult
from pawl.scenarios.ledger import (
    VersionRewards,
    curves_of,
    is_trained,
    policy_facts,
    trainable_share,
)
from pawl.scenarios.progress import EndingRule, HeldOut, Progress, Wave, largest_fall, render
from pawl.scenarios.report import closing_words, labelled_looks, write_report
from store.ids import new_id
from store.policy_table import PolicySpec
from store.read.evaluations import Evaluation
from store.read.stats import PolicyTotals
from store.records import UpdateRow
from store.versions import PolicyVersion
from tests.support.proxy.versions import version

SPECS = (
    PolicySpec(name="writer", base="m"),
    PolicySpec(name="rewriter", base="m"),
    PolicySpec(name="checker", base="m", trained=False),
)
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
    "held_out": [{"families": {}}, {"families": {}}],
}


def ending(most_waves: int = 40, updates: int | None = None) -> EndingRule:
    return EndingRule(learned=0.9, most_waves=most_waves, updates=updates)


def counted(policy: str, calls: int, trainable: int, side: int = 0) -> PolicyTotals:
    return PolicyTotals(
        policy=policy,
        calls=calls,
        side_calls=side,
        trainable_calls=trainable,
        failed_calls=0,
        versions=3,
        trained_episodes=calls,
    )


def ran(**metrics: float) -> RunResult:
    return RunResult(task="t", sample=0, output="", error=None if metrics else "e", metrics=metrics)


def update(policy: str, version: int | None, state: str = "done", **metrics: float) -> UpdateRow:
    now = datetime.now(UTC)
    return UpdateRow(
        id=new_id(),
        policy=policy,
        parent_version=0,
        version=version,
        state=state,
        claimed_at=now,
        finished_at=now,
        metrics=metrics,
    )


def progress(
    *scores: float, updates: tuple[UpdateRow, ...] = (), minutes: float = 30, seconds: float = 0
) -> Progress:
    """A run with a wave of each score, between two looks at the held-out tasks."""
    waves = [
        Wave(number, 0, 2, "reward", [ran(reward=score), ran(reward=0.2)], mean_reward=score)
        for number, score in enumerate(scores, start=1)
    ]
    return Progress(
        title="A title",
        policy="writer",
        held_out=[
            HeldOut(waves=0, updates=0, score=0.25),
            HeldOut(waves=1, updates=1, score=0.75),
        ],
        waves=waves,
        updates=updates,
        minutes=minutes,
        seconds=seconds,
    )


def updated(count: int) -> tuple[UpdateRow, ...]:
    return tuple(update("writer", version + 1) for version in range(count))


# What is counted


def test_calls_of_a_policy_that_is_not_trained_do_not_count_as_untrainable() -> None:
    totals = [counted("writer", 10, 9), counted("checker", 10, 0)]
    assert trainable_share(SPECS, totals) == 0.9
    assert trainable_share(SPECS, totals[1:]) is None


def test_side_calls_do_not_count_as_untrainable() -> None:
    totals = [counted("writer", 14, 9, side=4)]
    assert trainable_share(SPECS, totals) == 0.9
    assert trainable_share(SPECS, [counted("writer", 4, 0, side=4)]) is None


def test_policy_without_a_call_has_an_entry_in_the_summary() -> None:
    facts = policy_facts(SPECS, [counted("writer", 10, 9)])
    assert facts == {
        "writer": {"trained": True, "versions": 3, "trained_episodes": 10},
        "rewriter": {"trained": True, "versions": 0, "trained_episodes": 0},
        "checker": {"trained": False, "versions": 0, "trained_episodes": 0},
    }


def test_failed_run_lowers_a_waves_score() -> None:
    wave = Wave(1, 0, 4, "reward")
    assert (wave.success, wave.well_formed_share) == (0.0, None)
    wave.results += [ran(reward=1.0), ran()]
    assert (wave.success, wave.well_formed_share) == (0.5, None)
    wave.results += [ran(reward=1.0, well_formed=1.0), ran(reward=0.0, well_formed=0.0)]
    assert (wave.success, wave.well_formed_share) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("updates", "versions", "number", "trained"),
    [
        ([], [], 1, False),
        ([update("writer", 1)], [], 1, False),
        ([update("writer", 1)], [version(1, "serving", "writer")], 1, True),
        ([update("writer", 1)], [version(1, "serving", "writer")], 2, False),
        ([update("writer", None)], [version(0, "serving", "writer")], 1, True),
        ([update("writer", 1), update("rewriter", 1)], [version(1, "serving", "writer")], 1, False),
        ([update("rewriter", 1)], [version(1, "serving", "rewriter")], 1, False),
        (
            [update("writer", 1), update("rewriter", None, "running")],
            [version(1, "serving", "writer")],
            1,
            False,
        ),
    ],
)
def test_wave_is_over_with_the_leading_policys_update(
    updates: list[UpdateRow], versions: list[PolicyVersion], number: int, trained: bool
) -> None:
    assert is_trained(updates, versions, ("writer", "rewriter"), "writer", number) == trained


def point(policy: str, version: int, mean: float | None, scored: int = 4) -> Evaluation:
    return Evaluation(policy=policy, version=version, episodes=5, scored=scored, mean=mean)


def test_each_policy_has_its_own_curve_of_rewards_by_version() -> None:
    worked = [point("writer", 0, 0.25), point("rewriter", 1, 0.5), point("checker", 0, 0.3)]
    asked = [point("writer", 2, 0.75, 8), point("writer", 0, None, 0)]
    assert curves_of(["writer", "rewriter", "third"], worked, asked) == {
        "writer": [
            VersionRewards(version=0, reward=0.25, episodes=4),
            VersionRewards(version=2, held_out=0.75, held_out_episodes=8),
        ],
        "rewriter": [VersionRewards(version=1, reward=0.5, episodes=4)],
        "third": [],
    }


@pytest.mark.parametrize(
    ("scores", "fall"),
    [
        ([], 0),
        ([0.3], 0),
        ([0.3, 0.5, 0.9], 0),
        ([0.3, 0.9, 0.8, 0.95, 0.9], 0.1),
        ([0.5, 0.2, 0.6], 0.3),
    ],
)
def test_fall_of_held_out_scores_is_measured_from_the_best_earlier_score(
    scores: list[float], fall: float
) -> None:
    assert largest_fall(scores) == pytest.approx(fall)


# When the waves end


@pytest.mark.parametrize(
    ("rule", "seen", "ends"),
    [
        (ending(), progress(0.95, updates=updated(1)), False),
        (ending(), progress(0.5, 0.95, updates=updated(2)), False),
        (ending(), progress(0.9, 0.95, updates=updated(2)), True),
        (ending(), progress(0.9, 0.9, 0.8, updates=updated(3)), False),
        (ending(most_waves=2), progress(0.1, 0.1), True),
        (ending(updates=6), progress(1, 1, 1, updates=updated(5)), False),
        (ending(updates=6), progress(0.1, updates=updated(6)), True),
        (
            ending(updates=2),
            progress(0.5, 0.5, updates=(*updated(1), update("writer", None))),
            False,
        ),
        (ending(), progress(0.1, 0.1, minutes=10, seconds=399), False),
        (ending(), progress(0.1, 0.1, minutes=10, seconds=401), True),
        (ending(updates=50), progress(0.1, 0.1, minutes=10, seconds=401), True),
    ],
    ids=[
        "one good wave",
        "the last wave is good",
        "two good waves in a row",
        "two good waves before the last",
        "as many waves as there may be",
        "learned, but too few updates",
        "enough updates",
        "an update without a version does not count",
        "time for one more wave",
        "no time for one more wave",
        "no time for more updates",
    ],
)
def test_waves_end_once_the_target_or_a_limit_is_reached(
    rule: EndingRule, seen: Progress, ends: bool
) -> None:
    assert rule.is_reached(seen) is ends


def test_limit_of_waves_grows_with_the_updates_asked_for() -> None:
    assert ending().waves == 40
    assert ending(most_waves=2, updates=50).waves == 100
    assert ending(updates=3).waves == 40


# What is shown and reported


def test_scenarios_report_is_a_json_summary_and_a_png(tmp_path: Path) -> None:
    write_report("reward", tmp_path, SUMMARY, progress(0.5, updates=updated(1)), {"m": []})
    assert json.loads((tmp_path / "summary.json").read_text()) == SUMMARY
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_shown_reward_of_a_wave_is_the_mean_of_the_leading_policys_update() -> None:
    updates = (update("rewriter", 1, reward_mean=0.1), update("writer", 1, reward_mean=0.4))
    console = Console(width=160)
    with console.capture() as shown:
        console.print(render(progress(0.5, updates=updates)))
    assert "A title" in shown.get()
    assert "0.40" in shown.get()
    assert "0.10" not in shown.get()


@pytest.mark.parametrize(("best", "said"), [(0.75, "75%[/] in 2"), (0.8, "75%[/] (best 80%) in 2")])
def test_closing_message_names_the_best_score_unless_it_is_the_last(best: float, said: str) -> None:
    words = closing_words("reward", SUMMARY | {"best": best}, Path("x"), Path("x/data"), "writer")
    assert f"Held-out reward went from [bold]25%[/] to [bold]{said} updates" in words


def test_closing_message_says_how_the_score_of_each_task_family_changed() -> None:
    looks = [{"families": {"a": 0.5, "b": 0.25}}, {}, {"families": {"a": 1.0, "b": 0.0}}]
    words = closing_words("reward", SUMMARY | {"held_out": looks}, Path("x"), Path("y"), "m")
    assert "By family of tasks: a 50% to 100%, b 25% to 0%.\n" in words


def size(picture: Path) -> tuple[int, int]:
    header = picture.read_bytes()[16:24]
    return int.from_bytes(header[:4]), int.from_bytes(header[4:])


def test_picture_of_several_policies_is_taller_than_of_a_single_policy(tmp_path: Path) -> None:
    seen = progress(0.5, updates=updated(1))
    writer = [
        VersionRewards(version=0, reward=0.3, episodes=8, held_out=0.25, held_out_episodes=8),
        VersionRewards(version=1, reward=0.5, episodes=8),
    ]
    write_report("reward", tmp_path / "one", SUMMARY, seen, {"writer": writer})
    write_report("reward", tmp_path / "two", SUMMARY, seen, {"writer": writer, "rewriter": []})
    one, two = (size(tmp_path / name / "reward.png") for name in ("one", "two"))
    assert one[0] == two[0]
    assert one[1] < two[1]


def test_picture_labels_the_first_best_and_last_held_out_score() -> None:
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
