"""Credit with a pencil: the defaults over a table, in every order of arrival."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.lines import call, calls, credited, episode, event, reward
from trainer.credit.baselines import BASELINES, NORMALISATIONS

STATUSES = st.sampled_from(["ok", "error", "timeout", "malformed", "denied"])
LATE_AND_CORRECTED = (reward(0.5, 40), reward(0.2, 10), reward(9.0, 50, "latency"))


def table() -> list[dict[str, Any]]:
    """Episodes of 1, 3 and 20 calls; one failed, one that nobody scored."""
    tried = [call("1", tool_events=[event("ok")]), call("2", tool_events=[event("error")]), call()]
    tried[2]["call"] = "3"
    long = calls(20)
    long[19]["tool_events"] = [event("malformed")]
    return [
        episode("one", 1.0),
        episode("three", *LATE_AND_CORRECTED, calls=tried),
        episode("twenty", 0.0, calls=long),
        episode("failed", state="failed", calls=calls(2)),
        episode("unscored", reward(1.0, 0, "thumbs"), state="unscored", calls=calls(3)),
    ]


# r_final, r_air, r_total, advantage of each call, and its weight. The mean of the final rewards 1,
# 0.5 and 0 is 0.5, their sample standard deviation 0.5; the mean of AIR is -0.05.
BY_HAND = {
    "one": (1.0, 0.0, 1.0, 1.1, 1 / 3, None),
    "three": (0.5, 0.05, 0.55, 0.2, 1 / 9, None),
    "twenty": (0.0, -0.2, -0.2, -1.3, 1 / 60, None),
    "failed": (None, 0.0, None, None, 0.0, "failed"),
    "unscored": (None, 0.0, None, None, 0.0, "unscored"),
}
# The same where the recipe gives a failed episode -1: the means are 0.125 and -0.0375, and the
# standard deviation of the final rewards is sqrt((0.875² + 0.375² + 0.125² + 1.125²) / 3).
WITH_FAILED = {
    "one": (1.0, 0.0, 1.0, 1.06861057987864383139, 1 / 4, None),
    "three": (0.5, 0.05, 0.55, 0.541624540486435914542, 1 / 12, None),
    "twenty": (0.0, -0.2, -0.2, -0.336685525167243946877, 1 / 80, None),
    "failed": (-1.0, 0.0, -1.0, -1.27354959519783579906, 1 / 8, None),
    "unscored": (None, 0.0, None, None, 0.0, "unscored"),
}


@pytest.mark.parametrize(
    ("rule", "expected"), [({}, BY_HAND), ({"failed_reward": -1}, WITH_FAILED)]
)
def test_every_order_of_arrival_gives_the_table(
    rule: dict[str, Any], expected: dict[str, Any]
) -> None:
    first = credited(table(), **rule)
    for (name, _), line in first.items():
        r_final, r_air, r_total, advantage, weight, reason = expected[name]
        found = (line.r_final, line.r_air, line.r_total, line.advantage, line.weight)
        wanted = (r_final, r_air, r_total, advantage, weight)
        assert found == pytest.approx(wanted, abs=1e-12), name
        assert line.reason == reason
    for order in itertools.permutations(table()):
        assert credited(order, **rule) == first


def with_tools(*statuses: str) -> list[dict[str, Any]]:
    """Episodes that all came to nothing, each with a tool call that ended so."""
    return [
        episode(f"e{number}", 0.0, calls=[call(tool_events=[event(status)])])
        for number, status in enumerate(statuses)
    ]


def test_eight_failures_whose_tools_differ_are_no_four_successes() -> None:
    """The AIR of ok is 0.2 and of error -0.1, their mean 0.05: ±0.15 / 0.5."""
    found = credited(with_tools(*["ok"] * 4, *["error"] * 4))
    assert [line.advantage for line in found.values()] == pytest.approx(
        [0.3] * 4 + [-0.3] * 4, abs=1e-12
    )
    assert {line.reason for line in found.values()} == {None}


@given(
    st.lists(st.lists(STATUSES, max_size=4), min_size=2, max_size=12),
    st.sampled_from(["group", "leave_one_out"]),
    st.sampled_from(sorted(NORMALISATIONS)),
)
def test_air_alone_never_weighs_more_than_its_bound(
    tools: list[list[str]], baseline: str, normalisation: str
) -> None:
    """Two ends of AIR's range, 0.4 apart, and 0.5 for a spread: 0.8."""
    lines = [
        episode(
            f"e{number}",
            1.0,
            calls=[call(str(n), tool_events=[event(s, id=str(n))]) for n, s in enumerate(own)]
            or [call()],
        )
        for number, own in enumerate(tools)
    ]
    found = credited(lines, baseline=baseline, normalisation=normalisation)
    for line in found.values():
        assert line.advantage is not None
        assert abs(line.advantage) <= 0.8 + 1e-12


def test_beside_a_success_air_is_divided_by_the_spread_of_the_final_rewards() -> None:
    lines = [*with_tools("ok", "error", "error"), episode("won", 4.0)]
    # Final rewards: mean 1, s = sqrt((3 + 9) / 3) = 2. AIR: mean 0.
    assert [line.advantage for line in credited(lines).values()] == pytest.approx(
        [-0.5 + 0.1, -0.5 - 0.05, -0.5 - 0.05, 1.5], abs=1e-12
    )


def test_a_group_without_spread_in_either_part_is_not_trained() -> None:
    assert {line.reason for line in credited(with_tools("ok", "ok")).values()} == {"no_spread"}
    # 0.2 for a tool or as a reward: the sums are equal, the parts are not.
    lines = [*with_tools("ok"), episode("other", 0.2)]
    assert {line.reason for line in credited(lines).values()} == {None}


def test_late_corrected_and_repeated_statements_in_any_order() -> None:
    other = episode("other", 1.0)
    first = credited([episode("e", *LATE_AND_CORRECTED), other])
    for order in itertools.permutations(LATE_AND_CORRECTED):
        assert credited([episode("e", *order, *order), other]) == first


def test_of_rewards_said_at_once_the_lowest_counts() -> None:
    for said in itertools.permutations([reward(0.5), reward(0.25), reward(1.0)]):
        assert credited([episode("e", *said)])["e", "1"].r_final == 0.25


def test_the_number_of_calls_changes_neither_advantage_nor_total_weight() -> None:
    """The bias of dividing by rows: a win in 20 calls is worth what one in 1 call is."""
    scores = (1.0, 0.0, 0.25, 0.1, 0.7)

    def group(task: str, counts: tuple[int, ...]) -> list[dict[str, Any]]:
        return [
            episode(f"{task}{place}", score, task=task, calls=calls(count))
            for place, (score, count) in enumerate(zip(scores, counts, strict=True))
        ]

    found = credited([*group("few", (1, 1, 1, 1, 1)), *group("many", (20, 3, 1, 7, 40))])
    for place in range(len(scores)):
        few, many = ([line for line in found.values() if line.episode == f"{task}{place}"]
                     for task in ("few", "many"))  # fmt: skip
        assert {line.advantage for line in few} == {line.advantage for line in many}
        total = [sum(line.weight for line in lines) for lines in (few, many)]
        assert total == pytest.approx([0.1, 0.1], abs=1e-12)


def test_groups_that_tell_nothing_are_not_trained() -> None:
    found = credited(
        [
            episode("same1", 0.1, task="same", calls=calls(3)),
            episode("same2", 0.1, task="same"),
            episode("alone", 1.0, task="alone"),
            episode("none1", 1.0, task=None),
            episode("none2", 0.0, task=None),
            episode("good", 1.0),
            episode("bad", 0.0),
        ]
    )
    reasons = {name: line.reason for (name, _), line in found.items()}
    assert reasons == {
        "same1": "no_spread", "same2": "no_spread", "alone": "alone",
        "none1": "alone", "none2": "alone", "good": None, "bad": None,
    }  # fmt: skip
    assert {line.advantage for line in found.values() if line.reason is not None} == {0.0}
    assert found["good", "1"].weight == 0.5


def test_advantages_are_computed_before_any_drop() -> None:
    untrainable = [call(trainable=False, reason="greedy")]
    found = credited([episode("a", 1.0), episode("b", 0.5), episode("c", 0.0, calls=untrainable)])
    assert found["c", "1"].reason == "no_trainable_call"
    assert [found[name, "1"].advantage for name in "abc"] == pytest.approx([1, 0, -1], abs=1e-12)
    assert [found[name, "1"].weight for name in "abc"] == [0.5, 0.5, 0.0]


def test_what_is_quarantined_counts_nowhere() -> None:
    found = credited([episode("a", 1.0), episode("b", 0.0), episode("q", 5.0, quarantined="doubt")])
    assert found["q", "1"].reason == "quarantined"
    assert found["a", "1"].advantage == pytest.approx(2**-0.5, abs=1e-12)


def test_a_reward_that_no_sum_of_squares_could_hold() -> None:
    found = credited([episode("a", 1e300), episode("b", -1e300), episode("c", 0.0)])
    assert [found[name, "1"].advantage for name in "abc"] == pytest.approx([1, -1, 0], abs=1e-12)


SCORES = st.sampled_from([0.0, 0.1, 0.3, 1.0, -1.0]) | st.floats(-10, 10)
EVENTS = st.lists(STATUSES, max_size=3)
CALLS = st.lists(st.tuples(st.booleans(), EVENTS), min_size=1, max_size=4)
EPISODES = st.lists(
    st.tuples(
        st.sampled_from(["t", "u", None]),
        st.lists(st.tuples(SCORES, st.integers(0, 3)), max_size=3),
        st.booleans(),
        CALLS,
    ),
    max_size=8,
)
RULES = st.fixed_dictionaries(
    {
        "assignment": st.sampled_from(["identical", "per_agent", "call"]),
        "baseline": st.sampled_from(sorted(BASELINES)),
        "normalisation": st.sampled_from(sorted(NORMALISATIONS)),
        "equal_weight": st.sampled_from(["episode", "call", "token"]),
        "failed_reward": st.sampled_from([None, -1.0]),
    }
)


def lines_of(drawn: Any) -> list[dict[str, Any]]:
    return [
        episode(
            f"e{number}",
            *[reward(value, at) for value, at in said],
            task=task,
            state="failed" if failed else "unscored",
            calls=[
                call(
                    str(place),
                    trainable=trainable,
                    agent="ab"[place % 2],
                    tool_events=[event(status, id=str(n)) for n, status in enumerate(events)],
                    feedback=[reward(0.25)] if place == 1 else [],
                )
                for place, (trainable, events) in enumerate(made)
            ],
        )
        for number, (task, said, failed, made) in enumerate(drawn)
    ]


@given(EPISODES, RULES, st.randoms(use_true_random=False))
def test_no_order_changes_a_bit_and_weights_sum_to_one(drawn: Any, rule: Any, random: Any) -> None:
    lines = lines_of(drawn)
    found = credited(lines, **rule)
    random.shuffle(lines)
    for line in lines:
        random.shuffle(line["feedback"])
    assert credited(lines, **rule) == found

    trained = [line for line in found.values() if line.reason is None]
    assert all(line.weight > 0 for line in trained)
    assert sum(line.weight for line in found.values()) == pytest.approx(
        1.0 if trained else 0.0, abs=1e-12
    )
    for line in found.values():
        assert (line.r_total is None) == (line.r_final is None) == (line.advantage is None)


@given(st.lists(st.tuples(SCORES, st.integers(1, 5)), min_size=2, max_size=12))
def test_over_episodes_the_advantages_of_a_group_sum_to_nothing(drawn: Any) -> None:
    lines = [
        episode(f"e{place}", score, calls=calls(count))
        for place, (score, count) in enumerate(drawn)
    ]
    found = credited(lines).values()
    assert sum(line.weight * (line.advantage or 0.0) for line in found) == pytest.approx(
        0, abs=1e-12
    )


@given(
    st.lists(st.integers(-100, 100), min_size=2, max_size=8),
    st.sampled_from([0.5, 2.0, 8.0]),
    st.integers(-50, 50),
)
def test_neither_scale_nor_shift_of_the_rewards_changes_an_advantage(
    scores: list[int], scale: float, shift: int
) -> None:
    """Where the spread is above its lower limit, as that of different integers' halves is."""

    def found(values: list[float]) -> list[float | None]:
        lines = [episode(f"e{place}", value) for place, value in enumerate(values)]
        return [line.advantage for line in credited(lines).values()]

    plain = found([float(score) for score in scores])
    moved = found([scale * (score + shift) for score in scores])
    assert moved == pytest.approx(plain, abs=1e-12)
