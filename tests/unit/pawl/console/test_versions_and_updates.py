"""What the screens of versions and updates make of what they read."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from pawl.console.updates import plots_of, stages_of
from pawl.console.versions import Effects, Order, lanes_of, picture_of, words_of
from store.ids import new_id
from store.retraining import Retrained
from store.versions import PolicyEvent, PolicyState

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("line", "lanes"),
    [
        ([], []),
        ([(2, 1), (1, 0), (0, None)], [0, 0, 0]),
        # 3 failed, and 4 was trained from 2 again.
        ([(4, 2), (3, 2), (2, 1), (1, 0), (0, None)], [0, 1, 0, 0, 0]),
        # Its parent is on a later page, and keeps its lane.
        ([(9, 4), (8, 7), (7, 6)], [0, 1, 1]),
        # An imported version has none, so the next one takes its lane.
        ([(3, None), (2, 0), (1, 0), (0, None)], [0, 0, 1, 0]),
    ],
)
def test_child_keeps_its_lane_down_to_its_parent(
    line: list[tuple[int, int | None]], lanes: list[int]
) -> None:
    assert lanes_of(line) == lanes


def test_line_to_a_version_of_a_later_page_stays_open() -> None:
    assert picture_of([(3, 1), (2, 1)])["paths"] == ["M9 22V88", "M27 66V88"]
    assert picture_of([(2, 1), (1, None)])["paths"] == ["M9 22V22C9 54 9 34 9 66"]


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
        order = Order(action="retrain", policy="m", number=1, **of)
        effects = Effects(changes=((1, ["retired"], list(serves)),), retrained=done)
        return effects.digest(order)

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
