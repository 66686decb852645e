"""AIR's rules against reward hacking."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.read.facts import MatchedEvent
from store.records import TOOL_STATUSES
from trainer.credit.air import (
    NO_USUAL_SCORES,
    UsualScores,
    air_reward,
    air_weight,
    canonical_arguments,
    scored_events,
    usual_scores,
)
from trainer.recipes.recipe import CreditOptions

RULE = CreditOptions()


def ended(status: str, arguments: str | None = "{}", tool: str = "calc") -> MatchedEvent:
    return msgspec.convert(
        {"id": None, "tool": tool, "arguments": arguments, "status": status}, MatchedEvent
    )


def air(*calls: list[MatchedEvent], usual: UsualScores = NO_USUAL_SCORES) -> float:
    """r_air by the scores alone, or by what they are above the usual ones."""
    return air_reward(scored_events(itertools.chain(*calls), RULE), usual, 0.2)


def usual(*events: MatchedEvent) -> UsualScores:
    return usual_scores(scored_events(events, RULE))


def test_air_is_lambda_times_the_mean_score_of_the_tool_events() -> None:
    assert air(
        [ended("ok", "1"), ended("timeout", "2")], [ended("malformed", "3")]
    ) == pytest.approx(0.2 * (1 - 0.5 - 1) / 3, abs=1e-12)
    assert air([]) == 0.0


def test_error_of_a_tool_that_ran_is_left_out_of_the_mean() -> None:
    red = [ended("error", str(number)) for number in range(9)]
    assert air(red) == air([]) == 0.0
    assert air(red, [ended("ok", "edit")]) == air([ended("ok", "edit")]) == 0.2
    assert air(red, [ended("malformed", "x")]) == air([ended("malformed", "x")]) == -0.2


@pytest.mark.parametrize(
    ("finals", "weight"),
    [([0.0, 0.0], 1.0), ([1.0, 0.0, 0.0, 0.0], 0.75), ([1.0] * 3, 0.0), ([-3.0, 7.0], 0.5)],
)
def test_weight_of_air_falls_to_0_as_more_episodes_succeed(
    finals: list[float], weight: float
) -> None:
    assert air_weight(finals, (0.0, 1.0)) == weight


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 0.05), (-1.0, 0.0), (0.0, 100.0)])
def test_weight_of_air_depends_on_rewards_relative_to_their_range(low: float, high: float) -> None:
    worst, best = [low] * 4, [high] * 4
    assert air_weight(worst, (low, high)) == 1.0
    assert air_weight(best, (low, high)) == 0.0
    assert air_weight([*worst, *best], (low, high)) == pytest.approx(0.5)


def test_tool_that_always_works_earns_no_air_however_often_it_is_called() -> None:
    heap = [ended("ok", str(number), "note") for number in range(1000)]
    assert air(heap, usual=usual(*heap)) == 0.0
    assert air(heap[:1], usual=usual(*heap)) == 0.0


def test_tool_event_counts_by_its_difference_from_its_tools_usual_score() -> None:
    # calc: 1, 1, -1 and -0.5, usually 0.125.
    claim = [ended("ok", "1"), ended("ok", "2"), ended("malformed", "3"), ended("timeout", "4")]
    assert air([ended("ok")], usual=usual(*claim)) == pytest.approx(0.2 * 0.875)
    assert air([ended("timeout")], usual=usual(*claim)) == pytest.approx(0.2 * -0.625)
    mixed = [ended("ok", tool="note"), ended("ok", "1"), ended("timeout", "4")]
    notes = ended("ok", tool="note")
    assert air(mixed, usual=usual(notes, *claim)) == pytest.approx(0.2 * (0.875 - 0.625) / 3)


def test_tool_that_never_ran_is_compared_with_all_tools() -> None:
    claim = [ended("malformed", "1", "no_tool"), ended("ok", "2")]
    assert air(claim[:1], usual=usual(*claim)) == -0.2
    assert air(claim[1:], usual=usual(*claim)) == 0.0


def test_many_easy_calls_are_worth_no_more_than_a_single_call() -> None:
    heap = [ended("ok", str(number)) for number in range(1000)]
    assert air(heap) == air(heap[:1]) == 0.2


def test_calls_of_the_same_tool_with_the_same_arguments_count_once() -> None:
    repeated = [ended("ok", '{"a": 1, "b": [2.0, true]}') for _ in range(9)]
    again = ended("ok", '{"b":[2,true],"a":1.0}')
    assert air([*repeated, ended("error", "{}")], [again]) == air([again], [ended("error", "{}")])


def test_worst_outcome_of_a_repeated_call_counts_in_any_order() -> None:
    endings = [ended("ok"), ended("error"), ended("malformed"), ended("ok", "other")]
    for order in itertools.permutations(endings):
        assert air(list(order)) == air([ended("malformed"), ended("ok", "other")])
        assert air(list(order[:2]), list(order[2:])) == 0.0


def test_another_tool_or_other_arguments_are_another_execution() -> None:
    assert air([ended("ok"), ended("timeout", tool="search")]) == 0.05
    assert air([ended("ok", "[1]"), ended("timeout", "[true]")]) == 0.05


def test_each_tool_execution_counts_if_its_arguments_are_not_known() -> None:
    unknown = [ended("ok", None), ended("ok", None), ended("timeout", None)]
    assert air(unknown) == 0.2 * 0.5
    same = [msgspec.structs.replace(one, id="t1") for one in unknown]
    assert air(same) == -0.1


@pytest.mark.parametrize("text", ["{not json", "[" * 10_000, "1" * 5000, "", '"\\ud800"'])
def test_tool_arguments_that_are_not_json_are_compared_as_text(text: str) -> None:
    assert canonical_arguments(f" {text} ").strip('"') == text.strip('"')


@given(st.sampled_from(TOOL_STATUSES))
def test_malformed_call_scores_below_every_other_status(status: str) -> None:
    assert air([ended(status)]) > air([ended("malformed")]) or status == "malformed"


@pytest.mark.parametrize("scores", [{"error": -1.0}, {"malformed": -0.5}, {"timeout": -2.0}])
def test_scores_that_favour_malformed_calls_are_refused(scores: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="malformed must score below"):
        CreditOptions(air_scores=dict(RULE.air_scores) | scores)
