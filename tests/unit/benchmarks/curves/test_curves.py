"""Curves of several seeds are compared where all of them have a value."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.curves.__main__ import main
from benchmarks.curves.picture import draw
from benchmarks.curves.runs import Run, band, run_of, table, value_at

SUMMARY: dict[str, Any] = {
    "seed": 3,
    "seconds": 90.0,
    "largest_fall": 0.02,
    "held_out": [
        {"waves": 0, "updates": 0, "score": 0.25},
        {"waves": 4, "updates": 6, "score": 0.75},
    ],
    "policies": {"checker": {"trained": False}, "writer": {"trained": True}},
    "by_version": {
        "writer": [
            {"version": 0, "reward": 0.25},
            {"version": 1, "reward": None},
            {"version": 2, "reward": 0.5},
        ]
    },
}


def test_a_summary_is_read_by_its_first_trained_policy() -> None:
    assert run_of(SUMMARY) == Run(
        seed=3,
        held_out=[(0, 0.25), (6, 0.75)],
        at_work=[(0, 0.25), (2, 0.5)],
        minutes=1.5,
        largest_fall=0.02,
    )


def test_a_band_is_straight_between_the_looks() -> None:
    slow, quick = [(0, 0.2), (4, 0.6)], [(0, 0.4), (2, 0.6), (8, 0.9)]
    expected = [(0, 0.2, 0.3, 0.4), (2, 0.4, 0.5, 0.6), (4, 0.6, 0.65, 0.7)]
    for point, values in zip(band([slow, quick]), expected, strict=True):
        assert point == pytest.approx(values)


@given(st.dictionaries(st.integers(0, 30), st.floats(0, 1), min_size=1), st.floats(0, 1))
def test_a_value_lies_between_those_beside_it(points: dict[int, float], share: float) -> None:
    curve = sorted(points.items())
    place = curve[0][0] + share * (curve[-1][0] - curve[0][0])
    value = value_at(curve, place)
    assert min(points.values()) - 1e-9 <= value <= max(points.values()) + 1e-9
    for own, expected in curve:
        assert value_at(curve, own) == expected


def test_mean_and_range_are_told(tmp_path: Path) -> None:
    better = {
        **SUMMARY,
        "seed": 4,
        "held_out": [*SUMMARY["held_out"][:1], {"updates": 5, "score": 0.85}],
    }
    groups = {"GRPO": [run_of(SUMMARY), run_of(better)], "SFT": [run_of(SUMMARY)]}
    both, one = table(groups).lines
    assert both[:5] == [
        "GRPO",
        "3, 4",
        "0.250 (0.250 to 0.250)",
        "0.800 (0.750 to 0.850)",
        "0.550 (0.500 to 0.600)",
    ]
    assert one[2:] == ["0.250", "0.750", "0.500", "6", "1.5", "0.020"]
    draw(tmp_path / "curves.png", groups)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_folder_without_a_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "math"
    monkeypatch.setattr("sys.argv", ["curves", f"GRPO={folder}"])
    with pytest.raises(SystemExit, match="run `make example`"):
        main()
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    main()
    assert "| GRPO | 3 | 0.250 | 0.750 |" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["curves", "GRPO"])
    with pytest.raises(SystemExit):
        main()
    assert "name its folders" in capsys.readouterr().err
