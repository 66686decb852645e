"""What a course of learning came to, from its exams (pure)."""

from pathlib import Path

import pytest

from benchmarks.overtraining.figures import (
    Exam,
    Found,
    Wave,
    bars,
    has_learned,
    largest_drop,
    tables,
    to_json,
)
from benchmarks.overtraining.picture import draw


def exams(*successes: float) -> tuple[Exam, ...]:
    return tuple(
        Exam(updates=3 * at, success=success, answers=192) for at, success in enumerate(successes)
    )


def course(*successes: float, updates: int = 24, demo: int | None = 8) -> Found:
    return Found(
        recipe="demo",
        seed=0,
        exams=exams(*successes),
        waves=(Wave(updates=0, success=0.2), Wave(updates=1, success=0.4)),
        steps=tuple({"grad_norm": 0.5, "trained_episodes": 64} for _ in range(updates)),
        demo_updates=demo,
    )


@pytest.mark.parametrize(
    ("successes", "drop"),
    [
        ((0.2, 0.5, 0.9), 0.0),
        ((0.2, 0.9, 0.88, 0.95), 0.02),
        # From the best before it, not from the exam before.
        ((0.95, 0.94, 0.92, 0.97), 0.03),
        ((), 0.0),
    ],
)
def test_a_drop_is_from_the_best_before(successes: tuple[float, ...], drop: float) -> None:
    assert largest_drop(exams(*successes)) == pytest.approx(drop)


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        (course(0.2, 0.97, 0.95), [True, True]),
        (course(0.2, 0.97, 0.93), [False, True]),
        (course(0.2, 0.97, updates=23), [True, False]),
        (course(0.2, 0.97, demo=None), [True, False]),
    ],
)
def test_both_bars_are_held_each_by_itself(found: Found, holds: list[bool]) -> None:
    assert [bar.holds for bar in bars(found)] == holds


def test_the_demo_ends_after_two_good_waves_in_a_row() -> None:
    waves = [Wave(updates=at, success=success) for at, success in enumerate((0.9, 0.8, 0.9, 0.95))]
    assert [has_learned(waves[:count], 0.9) for count in range(5)] == [False] * 4 + [True]


def test_the_standard_error_is_that_of_a_share() -> None:
    assert Exam(updates=0, success=0.97, answers=192).error == pytest.approx(0.0123, abs=1e-4)


def test_figures_are_told_kept_and_drawn(tmp_path: Path) -> None:
    found = course(0.2, 0.97, 0.95)
    told = "\n".join(table.markdown() for table in tables(found))
    assert "| largest drop | 0.020 |" in told
    assert "| 24 | 64 |" in told
    assert b'"demo_updates": 8' in to_json(found)
    draw(tmp_path / "found.png", found)
    assert (tmp_path / "found.png").stat().st_size > 1000
