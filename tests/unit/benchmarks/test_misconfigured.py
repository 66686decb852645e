"""Which bars of a misconfiguration are missed, and what is changed of the recipe (pure)."""

import tomllib
from typing import Any

import pytest

from benchmarks.misconfigured.episodes import UPDATE
from benchmarks.misconfigured.faults import FAULTS, packaged_recipe
from benchmarks.misconfigured.scenario import Outcome

FINE: dict[str, Any] = {
    "fault": "rank",
    "moment": "while it runs",
    "known_after_s": 3.0,
    "told": "the model server did not load m@1: check --max-lora-rank",
    "status": None,
    "spent": 2 * UPDATE,
    "learns_after_s": 60.0,
    "remedy": "--max-lora-rank",
}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, None),
        ({"spent": 2 * UPDATE + 1}, "episodes spent"),
        ({"moment": "at the start", "spent": 1}, "episodes spent"),
        ({"moment": "at the start", "spent": 0}, None),
        ({"known_after_s": None}, "did not say"),
        ({"told": "an error"}, "did not say"),
        ({"learns_after_s": 60.1}, "did not learn"),
        ({"learns_after_s": None}, "did not learn"),
    ],
)
def test_each_bar_is_held_by_itself(change: dict[str, Any], missed: str | None) -> None:
    found = Outcome(**(FINE | change)).missed
    assert len(found) == (missed is not None)
    assert missed is None or missed in found[0]


def test_the_recipe_is_the_packaged_one_but_for_a_line() -> None:
    whole = tomllib.loads(packaged_recipe())
    assert len(FAULTS) == 6
    for line in filter(None, (one.recipe or one.repaired for one in FAULTS)):
        changed = tomllib.loads(packaged_recipe(line))
        assert changed.pop("lora") == whole["lora"] | tomllib.loads(line)
        assert changed == {key: value for key, value in whole.items() if key != "lora"}
