"""When the waves of a run end: learned, enough of them, enough updates, or no time."""

from datetime import UTC, datetime

import pytest

from pawl.scenarios.agent import Ran
from pawl.scenarios.progress import Ending, Progress, Wave
from store.ids import new_id
from store.records import UpdateRow

USUAL = Ending(learned=0.9, most_waves=40)


def update(version: int | None) -> UpdateRow:
    return UpdateRow(
        id=new_id(),
        policy="m",
        parent_version=0,
        version=version,
        state="done",
        claimed_at=datetime.now(UTC),
        finished_at=None,
        metrics={},
    )


def progress(*scores: float, updates: int = 0, minutes: float = 30, seconds: float = 0) -> Progress:
    waves = [
        Wave(
            number,
            0,
            1,
            "reward",
            [Ran(task="t", sample=0, value="", error=None, metrics={"reward": score})],
        )
        for number, score in enumerate(scores, start=1)
    ]
    done = [update(version + 1) for version in range(updates)]
    return Progress(
        title="t", policy="m", waves=waves, updates=done, minutes=minutes, seconds=seconds
    )


@pytest.mark.parametrize(
    ("scores", "ends"),
    [((0.95,), False), ((0.5, 0.95), False), ((0.9, 0.95), True), ((0.9, 0.9, 0.8), False)],
)
def test_two_good_waves_in_a_row_end_it(scores: tuple[float, ...], ends: bool) -> None:
    assert USUAL.is_reached(progress(*scores, updates=len(scores))) is ends


def test_a_number_of_updates_is_gone_on_to_whatever_was_learned() -> None:
    asked = Ending(learned=0.9, most_waves=40, updates=6)
    assert not asked.is_reached(progress(1.0, 1.0, 1.0, updates=5))
    assert asked.is_reached(progress(0.1, 0.1, 0.1, updates=6))


def test_an_update_that_made_no_version_does_not_count() -> None:
    asked = Ending(learned=0.9, most_waves=40, updates=2)
    seen = progress(0.5, 0.5, updates=1)
    seen.updates = [*seen.updates, update(None)]
    assert not asked.is_reached(seen)


def test_there_are_waves_enough_for_so_many_updates() -> None:
    assert USUAL.waves == 40
    assert Ending(learned=0.9, most_waves=2, updates=50).waves == 100
    assert Ending(learned=0.9, most_waves=40, updates=3).waves == 40
    assert Ending(learned=0.9, most_waves=2).is_reached(progress(0.1, 0.1))


@pytest.mark.parametrize("updates", [None, 50])
def test_no_wave_is_begun_that_would_pass_the_time(updates: int | None) -> None:
    ending = Ending(learned=0.9, most_waves=40, updates=updates)
    assert not ending.is_reached(progress(0.1, 0.1, minutes=10, seconds=399))
    assert ending.is_reached(progress(0.1, 0.1, minutes=10, seconds=401))
