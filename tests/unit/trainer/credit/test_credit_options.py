"""Each option of a recipe's [credit], by its name, against a pencil."""

from math import sqrt
from typing import Any

import pytest

from tests.support.lines import call, calls, credited, episode, event, reward

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
                call("w", agent="writer", feedback=[reward(0.4), reward(-0.2, 5)]),
                call("c", agent="checker"),
            ],
        ),
    ]


def test_identical_is_the_default_and_counts_no_single_calls_reward() -> None:
    found = credited(two_agents(), air_lambda=0.0)
    assert found == credited(two_agents(), air_lambda=0.0, assignment="identical")
    assert {(line.episode, line.r_final) for line in found.values()} == {("a", 0.0), ("b", 1.0)}


def test_per_agent() -> None:
    found = credited(two_agents(), assignment="per_agent")
    # writer: 1 + 0.2 against -0.2, means 0.4 and 0.1, s = 1.2·√½; checker: 0 against 1.
    assert [found[key].r_final for key in (("a", "w"), ("b", "w"))] == [1.0, -0.2]
    assert [found[key].r_air for key in (("a", "w"), ("a", "c"))] == [0.2, 0.0]
    assert advantages(found, ("a", "w"), ("b", "w")) == near(7 / 6 * HALF, -7 / 6 * HALF)
    assert advantages(found, ("a", "c"), ("b", "c")) == near(-HALF, HALF)
    assert {line.weight for line in found.values()} == {0.25}


def test_per_agent_takes_the_mean_of_what_an_agents_calls_were_given() -> None:
    own = [call("1", feedback=[reward(1.0)]), call("2", feedback=[reward(0.5)]), call("3")]
    found = credited([episode("a", calls=own)], assignment="per_agent")
    assert [line.r_final for line in found.values()] == [0.75] * 3


def test_any_reward_of_a_single_call() -> None:
    own = [call("1", feedback=[reward(0.0, 1), reward(1.0, 2)]), call("2")]
    found = credited([episode("a", 0.0, calls=own), episode("b", 0.0)], assignment="call")
    # Values 1 and 0 in a, 0 in b; means 0.5 and 0; s² = (0.75² + 0.25²)/2 + 0.25².
    s = sqrt(0.375)
    assert [found["a", name].r_final for name in "12"] == [1.0, 0.0]
    assert advantages(found, ("a", "1"), ("a", "2"), ("b", "1")) == near(
        0.75 / s, -0.25 / s, -0.25 / s
    )


def test_a_call_without_any_reward_is_not_trained() -> None:
    own = [call("1", feedback=[reward(1.0)]), call("2")]
    found = credited([episode("a", calls=own), episode("b", 0.0)], assignment="call")
    assert (found["a", "2"].reason, found["a", "2"].r_total) == ("unscored", None)
    assert [found[key].weight for key in (("a", "1"), ("b", "1"))] == [0.5, 0.5]


# Baselines and normalisations


def three() -> list[dict[str, Any]]:
    return [episode("a", 1.0, calls=calls(4)), episode("b", 0.0), episode("c", 0.0)]


KEYS = (("a", "1"), ("b", "1"), ("c", "1"))


@pytest.mark.parametrize(
    ("baseline", "normalisation", "expected"),
    [
        # GRPO: mean ⅓, s = √⅓.
        ("group", "group", (2 / sqrt(3), -1 / sqrt(3), -1 / sqrt(3))),
        # Dr. GRPO leaves the division out.
        ("group", "none", (2 / 3, -1 / 3, -1 / 3)),
        # RLOO: against 0, ½ and ½.
        ("leave_one_out", "none", (1.0, -0.5, -0.5)),
        ("leave_one_out", "group", (sqrt(3), -sqrt(3) / 2, -sqrt(3) / 2)),
        ("none", "group", (1.0, 0.0, 0.0)),
        ("none", "none", (1.0, 0.0, 0.0)),
        # REINFORCE++ takes mean and spread over the update.
        ("none", "batch", (2 / sqrt(3), -1 / sqrt(3), -1 / sqrt(3))),
    ],
)
def test_baselines_and_normalisations(
    baseline: str, normalisation: str, expected: tuple[float, ...]
) -> None:
    found = credited(three(), baseline=baseline, normalisation=normalisation)
    assert advantages(found, *KEYS) == near(*expected)
    assert {line.reason for line in found.values()} == {None}


def test_without_a_baseline_what_is_alone_or_alike_is_trained() -> None:
    lines = [episode("a", 1.0, task="t"), episode("b", 1.0, task="t"), episode("c", 0.5, task=None)]
    found = credited(lines, baseline="none")
    assert [(line.advantage, line.reason) for line in found.values()] == [
        (1.0, None), (1.0, None), (0.5, None),
    ]  # fmt: skip


def test_batch_divides_by_the_updates_spread() -> None:
    lines = [*three(), episode("d", 0.5, task="u"), episode("e", 0.5, task="u")]
    lines += [episode("f", 0.0, task="v"), episode("g", 4.0, task="v"), episode("h", 9.0, task="w")]
    found = credited(lines, normalisation="batch")
    # Differences from the groups' means: ⅔, -⅓, -⅓, 0, 0, -2, 2; h has nobody.
    s = sqrt((4 / 9 + 1 / 9 + 1 / 9 + 8) / 6)
    assert advantages(found, *KEYS) == near(2 / 3 / s, -1 / 3 / s, -1 / 3 / s)
    assert advantages(found, ("f", "1"), ("g", "1")) == near(-2 / s, 2 / s)
    reasons = [found[name, "1"].reason for name in "deh"]
    assert reasons == ["no_spread", "no_spread", "alone"]


def test_without_a_baseline_nothing_is_without_signal() -> None:
    """A learner with a value head learns from returns that are all alike, too."""
    rule = {"baseline": "none", "normalisation": "batch"}
    [only] = credited([episode("a", 1.0)], **rule).values()
    assert (only.advantage, only.reason, only.weight) == (0.0, None, 1.0)
    found = credited([episode("a", 1.0), episode("b", 1.0, task="u")], **rule)
    assert {(line.advantage, line.reason) for line in found.values()} == {(0.0, None)}


def test_no_small_spread_is_blown_up() -> None:
    lines = [episode("a", 0.0), episode("b", 0.01)]
    assert advantages(credited(lines), ("a", "1"), ("b", "1")) == near(-0.05, 0.05)


# Weights


def test_equal_weight_of_calls_and_of_tokens() -> None:
    own = [call("1", sampled_ids=[1] * 6), call("2", sampled_ids=[1] * 2)]
    lines = [episode("a", 1.0, calls=own), episode("b", 0.0, calls=[call(sampled_ids=[1] * 4)])]

    def shares(equal: str) -> list[float]:
        return [line.weight for line in credited(lines, equal_weight=equal).values()]

    assert shares("episode") == near(1 / 4, 1 / 4, 1 / 2)
    assert shares("call") == near(1 / 3, 1 / 3, 1 / 3)
    assert shares("token") == near(6 / 12, 2 / 12, 4 / 12)


# AIR


def paid_and_tooled() -> list[dict[str, Any]]:
    """Final rewards 1, 0, 0 and AIR 0.2, -0.1, -0.1."""
    tools = [("a", 1.0, "ok"), ("b", 0.0, "error"), ("c", 0.0, "error")]
    return [
        episode(name, reward, calls=[call(tool_events=[event(status)])])
        for name, reward, status in tools
    ]


@pytest.mark.parametrize(
    ("baseline", "normalisation", "expected"),
    [
        # Differences ⅔, -⅓, -⅓ and 0.2, -0.1, -0.1; s = √⅓ is above AIR_SPREAD.
        ("group", "group", (2 / sqrt(3) + 0.2 * sqrt(3), -1 / sqrt(3) - 0.1 * sqrt(3))),
        ("group", "none", (2 / 3 + 0.2, -1 / 3 - 0.1)),
        # Against 0 and -0.1; ½ and 0.05.
        ("leave_one_out", "none", (1.0 + 0.3, -0.5 - 0.15)),
        ("leave_one_out", "group", (1.3 * sqrt(3), -0.65 * sqrt(3))),
        # A baseline that is 0 has no spread: the return as it is.
        ("none", "group", (1.2, -0.1)),
        ("none", "none", (1.2, -0.1)),
        # Each part minus its mean over the update, by the spread of the final rewards.
        ("none", "batch", (2 / sqrt(3) + 0.2 * sqrt(3), -1 / sqrt(3) - 0.1 * sqrt(3))),
    ],
)
def test_baselines_and_normalisations_with_air(
    baseline: str, normalisation: str, expected: tuple[float, float]
) -> None:
    found = credited(paid_and_tooled(), baseline=baseline, normalisation=normalisation)
    assert advantages(found, *KEYS) == near(expected[0], expected[1], expected[1])
    assert {line.reason for line in found.values()} == {None}


def test_batch_divides_air_by_the_spread_of_the_updates_final_rewards() -> None:
    lines = [*paid_and_tooled(), episode("f", 0.0, task="v"), episode("g", 4.0, task="v")]
    found = credited(lines, normalisation="batch")
    s = sqrt((4 / 9 + 1 / 9 + 1 / 9 + 8) / 4)
    assert advantages(found, *KEYS) == near(
        (2 / 3 + 0.2) / s, (-1 / 3 - 0.1) / s, (-1 / 3 - 0.1) / s
    )


def test_air_is_not_blown_up_where_the_final_rewards_have_no_spread() -> None:
    lines = [
        episode(name, 1.0, calls=[call(tool_events=[event(status)])])
        for name, status in (("a", "ok"), ("b", "error"))
    ]
    # 0.15 on both sides of the mean, divided by AIR_SPREAD.
    assert advantages(credited(lines), ("a", "1"), ("b", "1")) == near(0.3, -0.3)


def test_air_scores_by_status() -> None:
    line = episode("a", 0.0, calls=[call(tool_events=[event("ok"), event("error", "search")])])
    scores = {"ok": 0.8, "error": -0.1, "timeout": 0.0, "denied": 0.0, "malformed": -1.0}
    found = credited([line], air_lambda=0.1, air_scores=scores)
    assert found["a", "1"].r_air == pytest.approx(0.1 * (0.8 - 0.1) / 2, abs=1e-12)
