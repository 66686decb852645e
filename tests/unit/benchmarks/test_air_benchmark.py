"""`benchmarks.air`: the toy task's rules, and what its curves come to."""

import random

import pytest

from benchmarks.air.figures import bars, easy_table, median_ratio, reach_table, reached, reaches
from benchmarks.air.task import Outcome, Task, begin, new_task, take
from benchmarks.air.worlds import ARMS, EASY, SPARSE, WITH, WITHOUT, Look

TASK = Task(
    name="t",
    tools=EASY.tools,
    turns=4,
    keys=("k1", "k2"),
    answers=(("v3", "r4"), ("v5", "r6")),
)


def played(*calls: str, task: Task = TASK) -> list[Outcome]:
    """What comes of these calls one after the other."""
    outcomes, state = [], begin(task)
    for call in calls:
        outcomes.append(take(task, state, call.split()))
        state = outcomes[-1].state
    return outcomes


def test_the_chain_with_the_first_key_is_rewarded() -> None:
    found = played("lookup k1 end", "convert v3 end", "submit r4 end")
    assert [(one.status, one.answer) for one in found[:2]] == [("ok", "v3"), ("ok", "r4")]
    assert found[0].reply == ("result", "ok", "v3", "call")
    assert found[-1].state.ended
    assert found[-1].state.reward == 1.0


def test_with_the_other_key_all_tools_work_and_nothing_is_earned() -> None:
    found = played("lookup k2 end", "convert v5 end", "submit r6 end")
    assert {one.status for one in found} == {"ok"}
    assert found[-1].state.ended
    assert found[-1].state.reward == 0.0


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ("lookup k3 end", "error"),
        ("convert v3 end", "error"),
        ("note r9 end", "ok"),
        ("lookup v3 end", "malformed"),
        ("lookup end", "malformed"),
        ("lookup k1 k2 end", "malformed"),
        ("lookup k1", "malformed"),
        ("k1 lookup end", "malformed"),
    ],
)
def test_how_a_first_call_ends(call: str, status: str) -> None:
    [found] = played(call)
    assert found.status == status
    assert not found.state.ended


def test_what_was_used_is_gone() -> None:
    found = played("lookup k1 end", "lookup k1 end", "lookup k2 end")
    assert [one.status for one in found] == ["ok", "error", "error"]


def test_an_episode_ends_with_its_turns() -> None:
    assert [one.state.ended for one in played(*["note k1 end"] * 4)] == [False] * 3 + [True]


def test_tasks_are_fresh_and_repeatable() -> None:
    one = [new_task("", SPARSE.tools, 4, random.Random(seed)) for seed in (1, 1, 2)]
    assert one[0] == one[1] != one[2]


def curve(*shares: float) -> list[Look]:
    """A look every ten episodes."""
    return [Look(10 * place, share, 3.0, 1.0) for place, share in enumerate(shares)]


def test_episodes_until_success() -> None:
    assert reached(curve(0.0, 0.59, 0.6, 0.1)) == 20
    assert reached(curve(0.0, 0.5)) is None


def test_ratios_and_their_median() -> None:
    curves = {
        WITH.name: {1: curve(0, 0.7, 0.8), 2: curve(0, 0.6, 0.6), 3: curve(0, 0, 0.5)},
        WITHOUT.name: {1: curve(0, 0.1, 0.6), 2: curve(0, 0, 0), 3: curve(0, 0.6, 0.6)},
    }
    found = reaches(curves)
    assert [reach.ratio for reach in found] == [0.5, 0.5, None]
    assert median_ratio(found) == 0.5
    assert median_ratio(found[2:]) is None
    table = reach_table("Sparse", found).markdown()
    assert "| 2 | 0.000 | 10 | > 20 | ≤ 0.50 |" in table
    assert "| 3 | 0.000 | > 20 | 10 | – |" in table


def test_a_fall_with_easy_calls_breaks_its_bars() -> None:
    flat, fallen = curve(*[0.5] * 6), curve(0.5, *[0.4] * 5)
    sparse = {arm.name: {1: curve(0, 0.6)} for arm in ARMS[SPARSE.name]}
    for own, holds in ((flat, True), (fallen, False)):
        easy = {arm.name: {1: own if arm == WITH else flat} for arm in ARMS[EASY.name]}
        found = {bar.name: bar.holds for bar in bars({SPARSE.name: sparse, EASY.name: easy})}
        assert found["easy_fall_from_start"] is holds
        assert found["easy_fall_from_without"] is holds
        assert "counter-example" in easy_table("Easy", easy).markdown()
