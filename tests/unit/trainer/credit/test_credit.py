"""Credit with a pencil, in every order of arrival: the defaults, and each option of `[credit]`."""

import itertools
from math import sqrt
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.records import Episode, Feedback, Group
from tests.conftest import ROOT
from tests.support import stored
from tests.support.docs.documents import split_blocks
from tests.support.lines import call, calls, credited, episode, event, reward
from tests.support.stored import transition
from trainer.credit import baselines
from trainer.credit.assign import TransitionCredit, assign_credit
from trainer.credit.baselines import BASELINES, NORMALISATIONS
from trainer.credit.lines import CreditLine
from trainer.errors import RecipeError
from trainer.recipes.recipe import CreditOptions, load_recipe, parse_recipe

STATUSES_OF_TOOLS = ["ok", "error", "timeout", "malformed", "denied"]
STATUSES = st.sampled_from(STATUSES_OF_TOOLS)
LATE_AND_CORRECTED = (reward(0.5, 40), reward(0.2, 10), reward(9.0, 50, "latency"))


def table() -> list[dict[str, Any]]:
    """Episodes of 1, 3 and 20 calls; one failed, one that nobody scored."""
    tried = [
        call("1", tool_events=[event("ok")]),
        call("2", tool_events=[event("timeout")]),
        call(),
    ]
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


# r_final, r_air, r_total, advantage of each call, and its weight.
#
# The tool scores 1, -0.5 and -1, usually -1/6: r_air of three is 0.2 · mean(7/6, -1/3) = 1/12, and
# of twenty 0.2 · -5/6 = -1/6. To fail is the lowest, 0: the mean of the final rewards 1, 0.5, 0 and
# 0 is 0.375, and that of AIR -1/48; AIR's weight is 1 - 0.375, and it is divided by 0.5.
S = sqrt((0.625**2 + 0.125**2 + 2 * 0.375**2) / 3)
BY_HAND = {
    "one": (1.0, 0.0, 1.0, 0.625 / S + 0.625 * 1 / 48 / 0.5, 1 / 4, None),
    "three": (0.5, 1 / 12, 0.5 + 0.625 / 12, 0.125 / S + 0.625 * 5 / 48 / 0.5, 1 / 12, None),
    "twenty": (0.0, -1 / 6, -0.625 / 6, -0.375 / S - 0.625 * 7 / 48 / 0.5, 1 / 80, None),
    "failed": (0.0, 0.0, 0.0, -0.375 / S + 0.625 * 1 / 48 / 0.5, 1 / 8, None),
    "unscored": (None, 0.0, None, None, 0.0, "unscored"),
}
# The same where failed episodes are unscored: the final rewards have the mean and the sample
# standard deviation 0.5, AIR the mean -1/36 and the weight 0.5.
UNSCORED = {
    "one": (1.0, 0.0, 1.0, 1 + 0.5 * 1 / 36 / 0.5, 1 / 3, None),
    "three": (0.5, 1 / 12, 0.5 + 0.5 / 12, 0.5 * 4 / 36 / 0.5, 1 / 9, None),
    "twenty": (0.0, -1 / 6, -0.5 / 6, -1 - 0.5 * 5 / 36 / 0.5, 1 / 60, None),
    "failed": (None, 0.0, None, None, 0.0, "failed"),
    "unscored": (None, 0.0, None, None, 0.0, "unscored"),
}
# The same where the recipe gives a failed episode -1: the mean of the final rewards is 0.125, their
# standard deviation is above 0.5, and AIR's weight is 1 - (1 + 0.5) / 4.
T = sqrt((0.875**2 + 0.375**2 + 0.125**2 + 1.125**2) / 3)
WITH_FAILED = {
    "one": (1.0, 0.0, 1.0, (0.875 + 0.4375 * 1 / 48) / T, 1 / 4, None),
    "three": (0.5, 1 / 12, 0.5 + 0.4375 / 12, (0.375 + 0.4375 * 5 / 48) / T, 1 / 12, None),
    "twenty": (0.0, -1 / 6, -0.4375 / 6, (-0.125 - 0.4375 * 7 / 48) / T, 1 / 80, None),
    "failed": (-1.0, 0.0, -1.0, (-1.125 + 0.4375 * 1 / 48) / T, 1 / 8, None),
    "unscored": (None, 0.0, None, None, 0.0, "unscored"),
}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, BY_HAND),
        ({"failed_reward": "unscored"}, UNSCORED),
        ({"failed_reward": -1}, WITH_FAILED),
    ],
)
def test_credit_is_the_table_by_hand_in_every_order_of_arrival(
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


def test_failures_with_different_tool_statuses_get_small_advantages() -> None:
    """The tool scores 1 and -1, usually 0; AIR is ±0.2, and its mean 0: ±0.2 / 0.5."""
    found = credited(with_tools(*["ok"] * 4, *["malformed"] * 4))
    assert [line.advantage for line in found.values()] == pytest.approx(
        [0.4] * 4 + [-0.4] * 4, abs=1e-12
    )
    assert {line.reason for line in found.values()} == {None}


@given(
    st.lists(st.lists(STATUSES, max_size=4), min_size=2, max_size=12),
    st.sampled_from(["group", "leave_one_out"]),
    st.sampled_from(sorted(NORMALISATIONS)),
)
def test_advantage_from_air_alone_never_exceeds_its_bound(
    tools: list[list[str]], baseline: str, normalisation: str
) -> None:
    """Two ends of AIR's range, 0.4 apart, and 0.5 for a spread: 0.8."""
    lines = [
        episode(
            f"e{number}",
            0.0,
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
    lines = [*with_tools("ok", "malformed", "malformed"), episode("won", 4.0)]
    # Final rewards: mean 1, s = sqrt((3 + 9) / 3) = 2. The tool scores -1/3 usually: AIR is 0.2
    # (clipped), twice 0.2 · -2/3, and 0 without a tool; its mean is -1/60. One of four episodes
    # succeeds, so its weight is 0.75.
    assert [line.advantage for line in credited(lines).values()] == pytest.approx(
        [
            -0.5 + 0.75 * (0.2 + 1 / 60) / 2,
            -0.5 + 0.75 * (-0.4 / 3 + 1 / 60) / 2,
            -0.5 + 0.75 * (-0.4 / 3 + 1 / 60) / 2,
            1.5 + 0.75 * (1 / 60) / 2,
        ],
        abs=1e-12,
    )


def test_group_of_successes_gets_no_advantage_from_its_tools() -> None:
    lines = [
        episode(f"e{number}", 1.0, calls=[call(tool_events=[event(status)])])
        for number, status in enumerate(STATUSES_OF_TOOLS)
    ]
    found = credited(lines).values()
    assert {(line.advantage, line.reason) for line in found} == {(0.0, "no_spread")}
    assert {line.r_total for line in found} == {1.0}


def test_success_in_ppo_returns_1_with_any_tool_status() -> None:
    """An episode is its own group there, and its return is what the critic learns."""
    lines = [
        episode(f"e{number}", 1.0, task=None, calls=[call(tool_events=[event(status)])])
        for number, status in enumerate(STATUSES_OF_TOOLS)
    ]
    found = credited(lines, **load_recipe("ppo").credit.model_dump())
    assert {line.r_total for line in found.values()} == {1.0}


# A test-driven agent: it edits, runs its tests, which may be red any number of times, and edits
# again. A blind one edits once and hands in.
def attempt(name: str, final: float, red_runs: int | None) -> dict[str, Any]:
    blind = [call("edit", tool_events=[event("ok", "edit", arguments='"first"')])]
    tested = [
        call(f"{turn}", tool_events=[event("error", "test", arguments=f"{turn}")])
        for turn in range(red_runs or 0)
    ]
    fixed = [call("again", tool_events=[event("ok", "edit", arguments='"second"')])]
    return episode(name, final, calls=blind if red_runs is None else blind + tested + fixed)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.none() | st.integers(0, 9)), max_size=8)
)
def test_blind_edit_is_never_preferred_to_a_tested_edit(others: list[tuple[float, Any]]) -> None:
    members = [attempt(f"e{number}", *one) for number, one in enumerate(others)]
    for final in (0.0, 0.5, 1.0):
        for red_runs in range(10):
            pair = [attempt("blind", final, None), attempt("tested", final, red_runs)]
            found = credited([*members, *pair])
            blind, tested = found["blind", "edit"].advantage, found["tested", "again"].advantage
            assert tested >= blind


def test_group_without_spread_in_final_rewards_and_air_is_not_trained() -> None:
    assert {line.reason for line in credited(with_tools("ok", "ok")).values()} == {"no_spread"}
    # 0.2 for a tool or as a reward: the sums are equal, the parts are not.
    lines = [*with_tools("ok", "malformed"), episode("other", 0.2)]
    assert {line.reason for line in credited(lines).values()} == {None}


def test_order_of_late_corrected_and_repeated_statements_is_irrelevant() -> None:
    other = episode("other", 1.0)
    first = credited([episode("e", *LATE_AND_CORRECTED), other])
    for order in itertools.permutations(LATE_AND_CORRECTED):
        assert credited([episode("e", *order, *order), other]) == first


def test_lowest_of_rewards_stated_at_once_counts() -> None:
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


def test_group_of_equal_rewards_is_not_trained() -> None:
    found = credited(
        [
            episode("same1", 0.1, task="same", calls=calls(3)),
            episode("same2", 0.1, task="same"),
            episode("good", 1.0),
            episode("bad", 0.0),
        ]
    )
    reasons = {name: line.reason for (name, _), line in found.items()}
    assert reasons == {"same1": "no_spread", "same2": "no_spread", "good": None, "bad": None}
    assert {line.advantage for line in found.values() if line.reason is not None} == {0.0}
    assert found["good", "1"].weight == 0.5


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_group_that_failed_or_succeeded_wholly_is_compared_with_its_family(baseline: str) -> None:
    lines = [episode(f"bad{n}", 0.0, task="t/hard") for n in range(3)]
    lines += [episode(f"good{n}", 1.0, task="t/easy") for n in range(2)]
    found = credited(lines, baseline=baseline, normalisation="none")
    # The family's five rewards have the mean 0.4.
    assert advantages(found, *((f"bad{n}", "1") for n in range(3))) == near(*[-0.4] * 3)
    assert advantages(found, ("good0", "1"), ("good1", "1")) == near(0.6, 0.6)
    assert {line.reason for line in found.values()} == {None}


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_single_episodes_are_compared_with_their_family_and_weigh_as_members_do(
    baseline: str,
) -> None:
    lines = [episode(f"s{n}", value, task=f"t/{n}") for n, value in enumerate((1.0, 0.0, 0.0))]
    lines += [episode("a", 1.0, task="t/all"), episode("b", 0.0, task="t/all")]
    found = credited(lines, baseline=baseline, normalisation="none")
    # The family's five rewards have the mean 0.4.
    singles = advantages(found, ("s0", "1"), ("s1", "1"), ("s2", "1"))
    assert singles == near(0.6, -0.4, -0.4)
    own = 0.5 if baseline == "group" else 1.0
    assert advantages(found, ("a", "1"), ("b", "1")) == near(own, -own)
    assert [line.weight for line in found.values()] == near(*[0.2] * 5)


def test_single_episode_of_a_family_that_comes_once_is_compared_with_all() -> None:
    lines = [episode("a", 1.0, task="x/1"), episode("b", 0.0, task="y/1")]
    found = credited(lines, normalisation="none")
    assert advantages(found, ("a", "1"), ("b", "1")) == near(0.5, -0.5)
    [only] = credited([episode("a", 1.0)]).values()
    assert (only.reason, only.advantage) == ("alone", 0.0)


def test_advantages_are_computed_before_untrainable_episodes_are_dropped() -> None:
    untrainable = [call(trainable=False, reason="greedy")]
    found = credited([episode("a", 1.0), episode("b", 0.5), episode("c", 0.0, calls=untrainable)])
    assert found["c", "1"].reason == "no_trainable_call"
    assert [found[name, "1"].advantage for name in "abc"] == pytest.approx([1, 0, -1], abs=1e-12)
    assert [found[name, "1"].weight for name in "abc"] == [0.5, 0.5, 0.0]


def test_quarantined_episode_is_not_trained_and_changes_no_other_advantage() -> None:
    found = credited([episode("a", 1.0), episode("b", 0.0), episode("q", 5.0, quarantined="doubt")])
    assert found["q", "1"].reason == "quarantined"
    assert found["a", "1"].advantage == pytest.approx(2**-0.5, abs=1e-12)


def test_huge_rewards_do_not_overflow() -> None:
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
        "equal_weight": st.sampled_from(["auto", "episode", "call", "token"]),
        "failed_reward": st.sampled_from([None, "unscored", -1.0]),
    }
).filter(lambda rule: (rule["baseline"], rule["normalisation"]) != ("none", "focal"))


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
def test_order_does_not_change_credit_and_weights_sum_to_1(
    drawn: Any, rule: Any, random: Any
) -> None:
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


# Options of [credit]

HALF = sqrt(0.5)


def advantages(found: Any, *keys: tuple[str, str]) -> list[float]:
    return [found[key].advantage for key in keys]


def near(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-12)


# Assignments


def two_agents() -> list[dict[str, Any]]:
    """The writer did well in `a` and badly in `b`; the episodes went the other way."""
    return [
        episode(
            "a",
            0.0,
            calls=[
                call("w", agent="writer", feedback=[reward(1.0)], tool_events=[event("ok")]),
                call("c", agent="checker"),
            ],
        ),
        episode(
            "b",
            1.0,
            calls=[
                call(
                    "w",
                    agent="writer",
                    feedback=[reward(0.4), reward(-0.2, 5)],
                    tool_events=[event("malformed")],
                ),
                call("c", agent="checker"),
            ],
        ),
    ]


def test_assignment_identical_is_the_default_and_ignores_rewards_stated_for_one_call() -> None:
    found = credited(two_agents(), air_lambda=0.0)
    assert found == credited(two_agents(), air_lambda=0.0, assignment="identical")
    assert {(line.episode, line.r_final) for line in found.values()} == {("a", 0.0), ("b", 1.0)}


def test_assignment_per_agent_compares_each_agent_by_its_own_returns() -> None:
    found = credited(two_agents(), assignment="per_agent")
    # writer: 1 + 0.2 against -0.2 - 0.2, means 0.4 and 0, AIR's weight ½, s = 1.2·√½; checker: 0
    # against 1.
    assert [found[key].r_final for key in (("a", "w"), ("b", "w"))] == [1.0, -0.2]
    assert [found[key].r_air for key in (("a", "w"), ("a", "c"))] == [0.2, 0.0]
    assert advantages(found, ("a", "w"), ("b", "w")) == near(7 / 6 * HALF, -7 / 6 * HALF)
    assert advantages(found, ("a", "c"), ("b", "c")) == near(-HALF, HALF)
    assert {line.weight for line in found.values()} == {0.25}


def test_assignment_per_agent_takes_the_mean_of_the_rewards_of_an_agents_calls() -> None:
    own = [call("1", feedback=[reward(1.0)]), call("2", feedback=[reward(0.5)]), call("3")]
    found = credited([episode("a", calls=own)], assignment="per_agent")
    assert [line.r_final for line in found.values()] == [0.75] * 3


def test_reward_stated_for_one_of_several_calls_is_the_return_of_that_call() -> None:
    own = [call("1", feedback=[reward(0.0, 1), reward(1.0, 2)]), call("2")]
    found = credited([episode("a", 0.0, calls=own), episode("b", 0.0)], assignment="call")
    # Values 1 and 0 in a, 0 in b; means 0.5 and 0; s² = (0.75² + 0.25²)/2 + 0.25².
    s = sqrt(0.375)
    assert [found["a", name].r_final for name in "12"] == [1.0, 0.0]
    assert advantages(found, ("a", "1"), ("a", "2"), ("b", "1")) == near(
        0.75 / s, -0.25 / s, -0.25 / s
    )


@pytest.mark.parametrize("assignment", ["call", "per_agent"])
def test_judges_opinion_about_a_call_counts_for_nothing_beside_a_fact(assignment: str) -> None:
    opinion = reward(0.0) | {"source": "judge"}
    lines = [
        episode("fact", 1.0, calls=[call(feedback=[opinion])]),
        episode("both", calls=[call("1", feedback=[reward(1.0)]), call("2", feedback=[opinion])]),
        episode("opinion", calls=[call(feedback=[opinion])]),
    ]
    found = credited(lines, assignment=assignment)
    assert (found["fact", "1"].r_final, found["opinion", "1"].r_final) == (1.0, 0.0)
    assert found["both", "2"].r_final == (0.0 if assignment == "call" else 1.0)


def test_a_call_without_any_reward_is_not_trained() -> None:
    own = [call("1", feedback=[reward(1.0)]), call("2")]
    found = credited([episode("a", calls=own), episode("b", 0.0)], assignment="call")
    assert (found["a", "2"].reason, found["a", "2"].r_total) == ("unscored", None)
    assert [found[key].weight for key in (("a", "1"), ("b", "1"))] == [0.5, 0.5]


# Baselines and normalisations


def three() -> list[dict[str, Any]]:
    return [episode("a", 1.0, calls=calls(4)), episode("b", 0.0), episode("c", 0.0)]


KEYS = (("a", "1"), ("b", "1"), ("c", "1"))


def paid_and_tooled() -> list[dict[str, Any]]:
    """Final rewards 1, 0, 0 and AIR 0.2, -0.1, -0.1, which has the weight ⅔."""
    tools = [("a", 1.0, "ok"), ("b", 0.0, "timeout"), ("c", 0.0, "timeout")]
    return [
        episode(name, reward, calls=[call(tool_events=[event(status)])])
        for name, reward, status in tools
    ]


# The advantages of a and of b, which c shares: of the final rewards alone, and with AIR.
@pytest.mark.parametrize(
    ("baseline", "normalisation", "finals", "with_air"),
    [
        # GRPO: differences ⅔, -⅓, -⅓ and 0.2, -0.1, -0.1; s = √⅓ is above AIR_SPREAD.
        (
            *("group", "group", (2 / sqrt(3), -1 / sqrt(3))),
            (2 / sqrt(3) + 0.4 / sqrt(3), -1 / sqrt(3) - 0.2 / sqrt(3)),
        ),
        # F-GRPO: one of three succeeds, so what GRPO gives counts ⅔.
        (
            *("group", "focal", (4 / 3 / sqrt(3), -2 / 3 / sqrt(3))),
            (4 / 3 / sqrt(3) + 0.4 / sqrt(3), -2 / 3 / sqrt(3) - 0.2 / sqrt(3)),
        ),
        # Dr. GRPO leaves the division out.
        ("group", "none", (2 / 3, -1 / 3), (2 / 3 + 0.4 / 3, -1 / 3 - 0.2 / 3)),
        # RLOO: against 0, ½ and ½; AIR against -0.1, 0.05 and 0.05.
        ("leave_one_out", "none", (1.0, -0.5), (1.0 + 0.2, -0.5 - 0.1)),
        (
            *("leave_one_out", "group", (sqrt(3), -sqrt(3) / 2)),
            (1.2 * sqrt(3), -0.6 * sqrt(3)),
        ),
        # A baseline that is 0 has no spread: the return as it is.
        ("none", "group", (1.0, 0.0), (1 + 0.4 / 3, -0.2 / 3)),
        ("none", "none", (1.0, 0.0), (1 + 0.4 / 3, -0.2 / 3)),
        # REINFORCE++: each part minus its mean over the update, by the spread of final rewards.
        (
            *("none", "batch", (2 / sqrt(3), -1 / sqrt(3))),
            (2 / sqrt(3) + 0.4 / sqrt(3), -1 / sqrt(3) - 0.2 / sqrt(3)),
        ),
    ],
)
def test_advantages_of_each_baseline_and_normalisation_are_as_calculated_by_hand(
    baseline: str,
    normalisation: str,
    finals: tuple[float, float],
    with_air: tuple[float, float],
) -> None:
    for lines, (first, other) in ((three(), finals), (paid_and_tooled(), with_air)):
        found = credited(lines, baseline=baseline, normalisation=normalisation)
        assert advantages(found, *KEYS) == near(first, other, other)
        assert {line.reason for line in found.values()} == {None}


def test_normalisation_focal_weighs_by_the_failure_rate_in_a_range_that_rewards_widen() -> None:
    lines = [episode(name, reward) for name, reward in (("a", 4.0), ("b", 4.0), ("c", 1.0))]
    plain, focal = credited(lines), credited(lines, normalisation="focal")
    # Of 0 to 4, the widest of the range and the rewards, they earn three quarters.
    for key in KEYS:
        assert focal[key].advantage == pytest.approx(plain[key].advantage / 4)


def test_episodes_alone_or_alike_are_trained_without_a_baseline() -> None:
    lines = [episode("a", 1.0, task="t"), episode("b", 1.0, task="t"), episode("c", 0.5, task=None)]
    found = credited(lines, baseline="none")
    assert [(line.advantage, line.reason) for line in found.values()] == [
        (1.0, None), (1.0, None), (0.5, None),
    ]  # fmt: skip


def test_normalisation_batch_divides_advantages_by_the_updates_spread() -> None:
    lines = [*three(), episode("d", 0.5, task="u"), episode("e", 0.5, task="u")]
    lines += [episode("f", 0.0, task="v"), episode("g", 4.0, task="v")]
    found = credited(lines, normalisation="batch")
    # Differences from the groups' means: ⅔, -⅓, -⅓, 0, 0, -2, 2.
    s = sqrt((4 / 9 + 1 / 9 + 1 / 9 + 8) / 6)
    assert advantages(found, *KEYS) == near(2 / 3 / s, -1 / 3 / s, -1 / 3 / s)
    assert advantages(found, ("f", "1"), ("g", "1")) == near(-2 / s, 2 / s)
    assert [found[name, "1"].reason for name in "de"] == ["no_spread", "no_spread"]


def test_equal_returns_are_a_signal_without_a_baseline() -> None:
    """A learner with a value head learns from returns that are all alike, too."""
    rule = {"baseline": "none", "normalisation": "batch"}
    [only] = credited([episode("a", 1.0)], **rule).values()
    assert (only.advantage, only.reason, only.weight) == (0.0, None, 1.0)
    found = credited([episode("a", 1.0), episode("b", 1.0, task="u")], **rule)
    assert {(line.advantage, line.reason) for line in found.values()} == {(0.0, None)}


def test_advantages_of_a_group_with_a_small_spread_are_not_blown_up() -> None:
    lines = [episode("a", 0.0), episode("b", 0.01)]
    assert advantages(credited(lines), ("a", "1"), ("b", "1")) == near(-0.05, 0.05)


# Weights


def test_families_of_tasks_have_equal_shares_of_the_loss_within_limits() -> None:
    lines = [
        episode(f"{family}{number}", float(number % 2), task=f"{family}:{number // 4}")
        for family, count in (("many", 60), ("some", 12), ("few", 4))
        for number in range(count)
    ]
    found = credited(lines)
    shares = {
        family: sum(line.weight for (name, _), line in found.items() if name.startswith(family))
        for family in ("many", "some", "few")
    }
    # 76 ÷ 3 episodes each would be equal: few has 16, which is four times its size.
    whole = 2 * 76 / 3 + 16
    assert list(shares.values()) == near(76 / 3 / whole, 76 / 3 / whole, 16 / whole)
    by_size = credited(lines, equal_weight="episode")
    assert {line.weight for line in by_size.values()} == {1 / 76}


def test_equal_weight_shares_the_loss_by_episode_call_or_token() -> None:
    own = [call("1", sampled_ids=[1] * 6), call("2", sampled_ids=[1] * 2)]
    lines = [episode("a", 1.0, calls=own), episode("b", 0.0, calls=[call(sampled_ids=[1] * 4)])]

    def shares(equal: str) -> list[float]:
        return [line.weight for line in credited(lines, equal_weight=equal).values()]

    assert shares("episode") == shares("auto") == near(1 / 4, 1 / 4, 1 / 2)
    assert shares("call") == near(1 / 3, 1 / 3, 1 / 3)
    assert shares("token") == near(6 / 12, 2 / 12, 4 / 12)


def test_default_weight_is_by_token_if_replies_are_long_and_else_by_episode() -> None:
    def weights(*lengths: int) -> list[float]:
        lines = [
            episode(f"e{n}", float(n % 2), calls=[call(sampled_ids=[1] * length)])
            for n, length in enumerate(lengths)
        ]
        return [line.weight for line in credited(lines).values()]

    assert weights(200, 800) == near(1 / 2, 1 / 2)
    assert weights(400, 1600) == near(1 / 5, 4 / 5)


# AIR


def test_normalisation_batch_divides_air_by_the_spread_of_the_updates_final_rewards() -> None:
    lines = [*paid_and_tooled(), episode("f", 0.0, task="v"), episode("g", 4.0, task="v")]
    found = credited(lines, normalisation="batch")
    s = sqrt((4 / 9 + 1 / 9 + 1 / 9 + 8) / 4)
    # The reward of 4 widens the range to 0 to 4, of which the three earn a twelfth.
    f = 11 / 12
    assert advantages(found, *KEYS) == near(
        (2 / 3 + f * 0.2) / s, (-1 / 3 - f * 0.1) / s, (-1 / 3 - f * 0.1) / s
    )


def test_air_uses_the_recipes_scores_of_tool_statuses() -> None:
    line = episode("a", 0.0, calls=[call(tool_events=[event("ok"), event("error", "search")])])
    scores = {"ok": 0.8, "error": -0.1, "timeout": 0.0, "denied": 0.0, "malformed": -1.0}
    found = credited([line], air_lambda=0.1, air_scores=scores)
    # Each tool gave what it usually does.
    assert found["a", "1"].r_air == 0.0
    other = episode("b", 0.0, calls=[call(tool_events=[event("malformed")])])
    found = credited([line, other], air_lambda=0.1, air_scores=scores)
    # calc scores -0.1 usually, search what it did.
    assert found["a", "1"].r_air == pytest.approx(0.1 * (0.9 + 0.0) / 2, abs=1e-12)
    assert found["b", "1"].r_air == pytest.approx(0.1 * -0.9, abs=1e-12)


def in_range(low: float, high: float) -> dict[tuple[str, str], CreditLine]:
    """The same episodes with their rewards in another range: one failed, and tools differ."""
    places = [("a", 1.0, "ok"), ("b", 0.5, "malformed"), ("c", 0.0, "timeout"), ("d", 0.0, "ok")]
    lines = [
        episode(name, low + (high - low) * place, calls=[call(tool_events=[event(status)])])
        for name, place, status in places
    ]
    lines.append(episode("failed", state="failed"))
    return credited(lines, reward_range=(low, high))


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 0.05), (-1.0, 0.0), (0.0, 100.0)])
def test_rewards_scaled_to_another_declared_range_give_the_same_advantages(
    low: float, high: float
) -> None:
    found = in_range(low, high).values()
    assert [line.advantage for line in found] == pytest.approx(
        [line.advantage for line in in_range(0.0, 1.0).values()], rel=1e-9
    )


def test_perfect_episodes_learn_nothing_from_tools_in_any_range() -> None:
    lines = [
        episode(f"e{number}", 0.0, calls=[call(tool_events=[event(status)])])
        for number, status in enumerate(["ok", "malformed", "timeout"])
    ]
    found = credited(lines, reward_range=(-1.0, 0.0))
    assert {line.reason for line in found.values()} == {"no_spread"}


def test_failed_episode_is_not_better_than_any_other() -> None:
    """The range was not declared, and all others were given -1."""
    lines = [episode(name, -1.0) for name in "abc"] + [episode("failed", state="failed")]
    found = credited(lines)
    assert found["failed", "1"].r_final == -1.0
    assert {line.advantage for line in found.values()} == {0.0}
    above = credited([episode("a", 0.5), episode("failed", state="failed")])
    assert above["failed", "1"].r_final == 0.0
    declared = credited([episode("a", 0.5), episode("f", state="failed")], reward_range=(-2.0, 1.0))
    assert declared["f", "1"].r_final == -2.0


# Groups of the store


def in_group(
    *episodes: Episode,
    earlier: tuple[Episode, ...] = (),
    task: str = "t",
    oldest: int = 0,
    **options: Any,
) -> tuple[TransitionCredit, ...]:
    group = Group(task=task, episodes=episodes, earlier=earlier)
    rule = CreditOptions()
    return assign_credit([group], rule, policy="m", oldest_version=oldest, **options).transitions


def opinion(value: float, source: str, at: int = 0) -> Feedback:
    return msgspec.structs.replace(stored.said(value, at), source=source)


def test_an_opinion_weighs_by_the_trust_in_its_judge_and_counts_for_nothing_beside_a_fact() -> None:
    found = in_group(
        stored.episode(1.0),
        stored.episode(None, feedback=(opinion(0.0, "half"),)),
        stored.episode(None, feedback=(opinion(0.0, "dice"),)),
        stored.episode(None, feedback=(stored.said(1.0), opinion(0.0, "dice", at=9))),
        trust={"half": 0.5, "dice": 0.0},
    )
    assert [one.weight for one in found] == near(0.4, 0.2, 0.0, 0.4)
    assert [one.reason for one in found] == [None, None, "untrusted", None]
    assert found[3].r_final == 1.0


def test_stale_episode_counts_in_the_baseline_and_is_not_trained() -> None:
    fresh = msgspec.structs.replace(stored.episode(1.0), calls=(transition(policy_version=5),))
    found = in_group(stored.episode(0.0), fresh, oldest=3)
    assert [c.reason for c in found] == ["stale", None]
    assert found[1].weight == 1.0
    assert found[1].advantage == pytest.approx(2**-0.5, abs=1e-12)


def test_late_members_of_a_group_are_compared_with_members_consumed_earlier() -> None:
    [found] = in_group(stored.episode(1.0), earlier=(stored.episode(0.0), stored.episode(0.0)))
    # mean ⅓, s = √⅓
    assert found.advantage == pytest.approx(2 * 3**-0.5, abs=1e-12)
    assert (found.weight, found.reason) == (1.0, None)


def test_episodes_without_a_task_are_no_group() -> None:
    episodes = [stored.episode(value, task=None) for value in (1.0, 0.0, 0.0, 0.0)]
    found = in_group(*episodes, task="")
    # The family of those without a task: mean ¼, and a variance of 3/16, of all of them.
    assert found[0].advantage == pytest.approx(0.75 / (3 / 16) ** 0.5, abs=1e-12)


# A baseline of one's own: a class, and its name in a table


RECIPE = '[credit]\nbaseline = "best"\nnormalisation = "none"'


@pytest.fixture
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline of the guide, beside those that come with Pawl."""
    page = ROOT / "docs/howto/add-a-baseline.md"
    [code] = [one for one in split_blocks(page, page.read_text())[1] if one.language == "python"]
    defined: dict[str, Any] = dict(vars(baselines))
    exec(code.text, defined)
    monkeypatch.setitem(BASELINES, "best", defined["BestOfGroup"]())


def test_unknown_baseline_is_refused_with_the_known_names() -> None:
    with pytest.raises(RecipeError, match=r"credit\.baseline: .*'best' is not known: use one of"):
        parse_recipe(RECIPE, "r.toml")


@pytest.mark.usefixtures("_toy")
def test_recipe_names_a_new_baseline_and_credit_is_computed_with_it() -> None:
    rule = parse_recipe(RECIPE, "r.toml").credit
    found = credited([episode("a", 1.0), episode("b", 0.25), episode("c", 0.0)], **dict(rule))
    assert [line.advantage for line in found.values()] == [0.0, -0.75, -1.0]
    assert {line.reason for line in found.values()} == {None}


@pytest.mark.usefixtures("_toy")
def test_recipe_with_a_new_baseline_is_refused_for_a_learner_with_a_critic() -> None:
    with pytest.raises(RecipeError, match='learner "ppo" has its critic as the baseline'):
        parse_recipe(f'learner = "ppo"\n{RECIPE}', "r.toml")


@pytest.mark.usefixtures("_toy")
def test_schema_of_the_recipe_lists_a_new_baseline() -> None:
    schema = CreditOptions.model_json_schema()
    assert "best" in schema["properties"]["baseline"]["enum"]


@pytest.mark.parametrize("assignment", ["identical", "per_agent", "call"])
def test_side_call_has_no_return_and_changes_no_other_call(assignment: str) -> None:
    # Somebody may reward a title, too: it is still not the agent's work.
    beside = call("side", trainable=False, reason="side", feedback=[reward(-1.0)])
    work = [call("1", feedback=[reward(0.25)]), call("2")]

    def of(*more: dict[str, Any]) -> dict[tuple[str, str], CreditLine]:
        one = episode("one", 1.0, calls=[*work, *more])
        failed = episode("two", state="failed")
        return credited([one, failed], assignment=assignment, normalisation="none")

    found = of(beside)
    side = found.pop(("one", "side"))
    assert (side.r_final, side.r_total, side.advantage) == (None, None, None)
    assert (side.weight, side.reason) == (0.0, "side")
    assert {line.reason for line in found.values()} == {None}
    assert found == of()
