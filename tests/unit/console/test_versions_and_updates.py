"""What the screens of versions and updates make of what they read."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from console.updates import plots_of
from console.versions import Change, describe_version

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ({"state": "rolled_back"}, ["rolled back"]),
        ({"state": "canary", "share": 0.5}, ["canary with 50 % of new episodes"]),
        ({"state": "retired", "share": 0.05}, ["control with 5 % of new episodes"]),
        ({"state": "retired", "unloaded_at": NOON}, ["retired", "unloaded"]),
        ({"state": "retired", "ended_at": NOON}, ["retired", "ended"]),
        ({"state": "serving", "frozen_at": NOON}, ["serving", "policy frozen"]),
        ({"version": 3, "state": "serving", "frozen_at": NOON}, ["serving", "training held"]),
    ],
)
def test_words_describe_the_state_of_a_version(
    version: dict[str, object], words: list[str]
) -> None:
    names = ("share", "unloaded_at", "ended_at", "files_deleted_at", "frozen_at")
    row: Any = SimpleNamespace(**{"version": 0, **dict.fromkeys(names), **version})
    assert describe_version(row) == words


def test_confirmation_of_a_change_depends_on_its_effects_and_not_on_its_reason() -> None:
    def seen(now: str = "serving", **of: Any) -> str:
        changed = {"action": "promote", "policy": "m", "number": 1} | of
        return Change(**changed, moved=((1, ["retired"], [now]),)).digest

    assert seen(reason="another") == seen()
    others = [seen("retired"), seen(number=2), seen(action="rollback"), seen(policy="n")]
    assert len({seen(), *others}) == 5


def update(at: int = 0, state: str = "done", took: float | None = 30, **metrics: Any) -> Any:
    begun = NOON + timedelta(seconds=at)
    return SimpleNamespace(
        state=state,
        claimed_at=begun,
        finished_at=None if took is None else begun + timedelta(seconds=took),
        metrics={"seconds": took, **metrics},
    )


def test_plots_show_recorded_figures_of_updates_oldest_first() -> None:
    newest = update(60, loss=0.2, entropy=0.3)
    plots = plots_of([newest, update(30, state="abandoned"), update(0, loss=0.4, entropy=2.1)])
    assert list(plots) == ["Entropy, nats a token", "Loss", "Seconds"]
    assert plots["Entropy, nats a token"]["series"][0]["values"] == [2.1, 0.3]
    assert plots["Loss"]["x"] == [NOON.timestamp(), NOON.timestamp() + 60]
    assert plots["Loss"]["series"] == [{"name": "loss", "values": [0.4, 0.2]}]


def test_reward_by_family_of_tasks_is_plotted_where_there_are_several() -> None:
    def of(**families: float) -> dict[str, Any]:
        return {name: {"reward": value, "episodes": 20} for name, value in families.items()}

    title = "Reward by family of tasks"
    several = plots_of([update(60, families=of(b=0.5)), update(0, families=of(a=0.2, b=0.1))])
    assert several[title]["series"] == [
        {"name": "a", "values": [0.2, None]},
        {"name": "b", "values": [0.1, 0.5]},
    ]
    assert title not in plots_of([update(0, families=of(b=0.5))])
