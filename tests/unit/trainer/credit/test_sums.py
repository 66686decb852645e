"""Rewards that are sums of metrics, with a pencil: parts, defaults, texts, withdrawals."""

import itertools
import json
from typing import Any

import msgspec
import pytest

from pawl.commands.credit import credit_table
from store.values.rewards import REWARD_ALONE
from tests.support.lines import call, credited, episode, reward
from trainer.credit.lines import credit_lines, read_lines
from trainer.recipes.recipe import CreditOptions, Recipe, parse_recipe

RECIPE = """
[reward.right]
range = [0, 1]

[reward.cost]
weight = -0.1
range = [0, 10]
default = 0

[reward.verdict]
weight = 0.5
range = [-1, 1]
values = {good = 1.0, bad = -1.0}
default = 0
"""
SUM = parse_recipe(RECIPE, "test").reward_rule
# What each episode was told, and by hand: r_final and its parts, or why there is none.
TABLE: dict[str, tuple[list[dict[str, Any]], float | None, Any]] = {
    "alone": ([reward(1, 0, "right")], 1.0, {"right": 1.0, "cost": 0.0, "verdict": 0.0}),
    "all": (
        [reward(1, 0, "right"), reward(2, 1, "cost"), reward("bad", 2, "verdict")],
        0.3,
        {"right": 1.0, "cost": -0.2, "verdict": -0.5},
    ),
    "clipped": (
        [reward(7, 0, "right"), reward(99, 1, "cost")],
        0.0,
        {"right": 1.0, "cost": -1.0, "verdict": 0.0},
    ),
    "corrected": (
        [
            *(reward(0, 0, "right"), reward(1, 9, "right")),
            *(reward("bad", 1, "verdict"), reward("good", 2, "verdict")),
        ],
        1.5,
        {"right": 1.0, "cost": 0.0, "verdict": 0.5},
    ),
    "default withdrawn": (
        [reward(1, 0, "right"), reward(5, 1, "cost"), reward(None, 2, "cost")],
        1.0,
        {"right": 1.0, "cost": 0.0, "verdict": 0.0},
    ),
    "required withdrawn": (
        [reward(1, 0, "right"), reward(5, 1, "cost"), reward(None, 2, "right")],
        None,
        "missing_metric",
    ),
    "nothing but another": ([reward(1, 0, "reward")], None, "unscored"),
    "without the required": ([reward(1, 0, "cost")], None, "missing_metric"),
    "in unknown words": ([reward("perfect", 0, "right")], None, "undeclared_text"),
    "in words that count for nothing": (
        [reward(1, 0, "right"), reward("so so", 1, "verdict")],
        1.0,
        {"right": 1.0, "cost": 0.0, "verdict": 0.0},
    ),
}


def test_reward_is_the_sum_of_its_metrics_in_any_order_of_statements() -> None:
    lines = [episode(name, *said) for name, (said, *_) in TABLE.items()]
    found = credited(lines, earns=SUM)
    for (name, _), line in found.items():
        _, r_final, parts = TABLE[name]
        assert line.r_final == (None if r_final is None else pytest.approx(r_final, abs=1e-12))
        if r_final is None:
            assert (line.reason, line.parts) == (parts, msgspec.UNSET), name
        else:
            assert line.parts == pytest.approx(parts), name
    for name, (said, *_) in TABLE.items():
        for order in itertools.permutations(said):
            others = [one for one in lines if one["episode"] != name]
            assert credited([*others, episode(name, *order)], earns=SUM) == found


def test_withdrawal_beats_a_number_and_a_number_beats_a_text_stated_at_the_same_time() -> None:
    said = [reward(1, 5, "right"), reward(0.5, 5, "right"), reward("x", 5, "right")]
    for order in itertools.permutations(said):
        [line] = credited([episode("e", *order)], earns=SUM).values()
        assert line.r_final == 0.5
        [line] = credited([episode("e", *order, reward(None, 5, "right"))], earns=SUM).values()
        assert line.reason == "unscored"


def test_reward_parts_are_summed_for_each_call_or_averaged_for_each_agent() -> None:
    said = [reward(1, 0, "right"), reward(4, 0, "cost")]
    calls = [call("1", feedback=said), call("2", feedback=[reward(0, 0, "right")]), call("3")]
    by_call = credited([episode("e", calls=calls)], earns=SUM, assignment="call")
    assert [line.r_final for line in by_call.values()] == [0.6, 0.0, None]
    by_agent = credited([episode("e", calls=calls)], earns=SUM, assignment="per_agent")
    assert {line.r_final for line in by_agent.values()} == {0.3}
    assert by_agent["e", "3"].parts == pytest.approx({"right": 0.5, "cost": -0.2, "verdict": 0.0})


def test_credit_lines_have_no_reward_parts_without_a_sum_of_metrics() -> None:
    lines = [episode("a", 1.0, reward(2, 0, "cost")), episode("b", 0.0)]
    read = read_lines([json.dumps(line).encode() for line in lines], "test")
    found = credit_lines(read, CreditOptions(), None, Recipe().reward_rule)
    assert all(b"parts" not in msgspec.json.encode(line) for line in found)
    assert "parts" not in [column.header for column in credit_table(found).columns]
    assert Recipe().reward_rule == REWARD_ALONE


def test_credit_table_shows_the_parts_of_a_summed_reward() -> None:
    shown = credit_table(list(credited([episode("e", *TABLE["all"][0])], earns=SUM).values()))
    assert [column.header for column in shown.columns][-1] == "parts"
    assert str(next(iter(shown.columns[-1].cells))) == "right +1, cost -0.2, verdict -0.5"
