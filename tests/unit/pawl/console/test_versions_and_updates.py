"""What the screens of versions and updates make of what they read."""

from datetime import UTC, datetime, timedelta

import pytest

from pawl.console.updates import differences, plots_of, stages_of
from pawl.console.versions import Edge, Effects, Order, edges_of, lanes_of, sentences_of
from store.ids import new_id
from store.read.lineage import Place, UpdateFigures
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
    line = [(3, 1), (2, 1)]
    assert edges_of(line, lanes_of(line)) == [Edge("M9 22V88", True), Edge("M27 66V88", True)]
    line = [(2, 1), (1, None)]
    assert edges_of(line, [0, 0]) == [Edge("M9 22V22C9 54 9 34 9 66", False)]


def place(state: PolicyState, version: int = 1, **more: object) -> Place:
    values = {"share": None, "unloaded": False, "ended": False, "frozen": False} | more
    return Place(version=version, served_name=f"m@{version}", state=state, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (place("loaded"), place("serving"), ["m@1 serves: new episodes begin with it."]),
        (
            place("serving"),
            place("retired", share=0.05),
            [
                "m@1 is retired: episodes that began with it keep it.",
                "m@1 is the control, with 5% of the new episodes.",
            ],
        ),
        (place("retired", share=0.05), place("retired"), ["m@1 is no longer the control."]),
        (
            place("retired"),
            place("retired", ended=True),
            [
                "Of the loaded versions these end: 1. An ended version never serves again, and"
                " nothing is trained from it."
            ],
        ),
        (
            place("serving"),
            place("serving", frozen=True),
            ["Only people move the traffic of m from now on; training goes on."],
        ),
        (place("retired", unloaded=True), place("retired"), []),
        (place("written"), place("written"), []),
    ],
)
def test_difference_is_told_in_sentences(before: Place, after: Place, said: list[str]) -> None:
    assert sentences_of("m", {1: before}, {1: after}) == said


def test_confirmation_is_of_the_effects_and_not_of_figures_that_move_on() -> None:
    order = Order(action="retrain", policy="m", number=1, without=("task=a",))
    seen = Effects(sentences=("m@1 serves.",), notes=("4 freed",)).digest(order)
    assert Effects(sentences=("m@1 serves.",), notes=("5 freed",)).digest(order) == seen
    assert Effects(sentences=("m@1 serves.", "m@2 ends.")).digest(order) != seen
    assert Effects(sentences=("m@1 serves.",), basis=("4000",)).digest(order) != seen
    other = Order(action="retrain", policy="m", number=1, without=("task=b",))
    assert Effects(sentences=("m@1 serves.",)).digest(other) != seen


def update(
    at: int = 0, state: str = "done", took: float | None = 30, **metrics: float
) -> UpdateFigures:
    begun = NOON + timedelta(seconds=at)
    return UpdateFigures(
        id=new_id(),
        policy="m",
        parent_version=0,
        version=1,
        state=state,
        claimed_at=begun,
        finished_at=None if took is None else begun + timedelta(seconds=took),
        metrics=metrics,
        other_recipe=False,
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

    events = [event("written", 30), event("loaded", 34), event("serving", 44)]
    assert stages_of(update(train_seconds=20.0), events) == {
        "read, planned and written": 10,
        "trained": 20,
        "loaded and probed": 4,
        "waited for traffic": 10,
    }
    assert stages_of(update(), events[:1]) == {"read and planned": 30}
    assert stages_of(update(took=None), []) == {}


def test_recipes_differ_in_the_keys_that_either_has() -> None:
    before = {"claim": {"groups": 4, "max_age_s": 60}, "learner": "grpo", "kl": {}}
    now = {"claim": {"groups": 8}, "learner": "grpo", "kl": {"place": "loss"}}
    assert differences(before, now) == [
        ("claim.groups", "4", "8"),
        ("claim.max_age_s", "60", "–"),
        ("kl", "{}", "–"),
        ("kl.place", "–", '"loss"'),
    ]
