"""What the screens of versions and updates make of what they read."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from pawl.console.updates import plots_of, stages_of
from pawl.console.versions import Change, arcs_of, words_of
from store.ids import new_id
from store.retraining import Retrained
from store.versions import PolicyEvent, PolicyState

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("line", "arcs"),
    [
        ([], []),
        ([(1, 0), (0, None)], ["M9 22Q9 44 9 66"]),
        # 3 failed, and 4 was trained from 2 again.
        ([(4, 2), (3, 2), (2, None)], ["M9 22Q21 66 9 110", "M9 66Q9 88 9 110"]),
        # The parents are on a later page, however far.
        ([(9, 4), (8, 7)], ["M9 22Q21 55 9 88", "M9 66Q9 77 9 88"]),
    ],
)
def test_version_is_joined_to_its_parent_past_those_between(
    line: list[tuple[int, int | None]], arcs: list[str]
) -> None:
    assert arcs_of(line) == arcs


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ({"state": "rolled_back"}, ["rolled back"]),
        ({"state": "canary", "share": 0.5}, ["canary with 50 % of new episodes"]),
        ({"state": "retired", "share": 0.05}, ["control with 5 % of new episodes"]),
        ({"state": "retired", "unloaded_at": NOON}, ["retired", "unloaded"]),
        ({"state": "retired", "ended_at": NOON}, ["retired", "ended"]),
        ({"state": "serving", "frozen_at": NOON}, ["serving", "policy frozen"]),
    ],
)
def test_version_stands_as_its_words_say(version: dict[str, object], words: list[str]) -> None:
    names = ("share", "unloaded_at", "ended_at", "files_deleted_at", "frozen_at")
    row: Any = SimpleNamespace(**{**dict.fromkeys(names), **version})
    assert words_of(row) == words


def test_confirmation_is_of_the_effects_and_not_of_figures_that_move_on() -> None:
    def seen(
        freed: int = 4, left_out: int = 2, serves: tuple[str, ...] = ("serving",), **of: Any
    ) -> str:
        done = Retrained(
            serves="m@1", served="m@2", freed={"trained": freed}, left_out=left_out, learned=0
        )
        moved = ((1, ["retired"], list(serves)),)
        retraining = {"action": "retrain", "policy": "m", "number": 1, "retrained": done}
        return Change(**retraining, moved=moved, **of).digest

    assert seen(freed=5) == seen()
    others = [seen(left_out=3), seen(serves=("serving", "ended")), seen(without=("task=b",))]
    assert len({seen(), *others}) == 4


def update(at: int = 0, state: str = "done", took: float | None = 30, **metrics: float) -> Any:
    begun = NOON + timedelta(seconds=at)
    return SimpleNamespace(
        state=state,
        claimed_at=begun,
        finished_at=None if took is None else begun + timedelta(seconds=took),
        metrics={"seconds": took, **metrics},
    )


def test_plots_have_the_figures_that_any_update_has_oldest_first() -> None:
    plots = plots_of([update(60, loss=0.2), update(30, state="abandoned"), update(0, loss=0.4)])
    assert list(plots) == ["Loss", "Seconds"]
    assert plots["Loss"]["x"] == [NOON.timestamp(), NOON.timestamp() + 60]
    assert plots["Loss"]["series"] == [{"name": "loss", "values": [0.4, 0.2]}]


def test_time_is_told_by_stage_as_far_as_it_is_known() -> None:
    def event(state: PolicyState, at: int) -> PolicyEvent:
        return PolicyEvent(
            id=new_id(),
            name="m",
            version=1,
            from_state=None,
            to_state=state,
            reason="",
            actor="trainer",
            evidence=None,
            at=NOON + timedelta(seconds=at),
        )

    events = [event("serving", 44), event("loaded", 34), event("written", 30)]
    assert stages_of(update(train_seconds=20.0), events) == {
        "read, planned and written": 10,
        "trained": 20,
        "loaded and probed": 4,
        "waited for traffic": 10,
    }
    assert stages_of(update(), events[2:]) == {"read, planned and written": 30, "trained": 0}
    assert stages_of(update(took=None), []) == {}
