"""What the screen Review makes of a policy's scales, and of what a person chose."""

import pytest

from console.pages import Refusal
from console.review import statements_of, steps_of
from store.judging import Scale

REWARD = Scale(metric="reward", low=-1.0, high=1.0, texts={})
VERDICT = Scale(metric="verdict", low=0.0, high=1.0, texts={"good": 1.0, "bad": 0.0})


def test_number_keys_stand_for_evenly_spaced_rewards_from_lowest_to_highest() -> None:
    assert steps_of(REWARD) == [-1, -0.5, 0, 0.5, 1]


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({"value:reward": " 0.5 "}, {"reward": 0.5}),
        ({"value:reward": "-1", "value:verdict": "good"}, {"reward": -1.0, "verdict": "good"}),
        ({"value:reward": "", "value:verdict": "0.25"}, {"verdict": 0.25}),
    ],
)
def test_review_form_states_only_the_metrics_that_were_filled_in(
    given: dict[str, str], values: dict[str, float | str]
) -> None:
    stated = statements_of(given, [REWARD, VERDICT], "e1")
    assert {one["metric"]: one["value"] for one in stated} == values
    assert {one["episode"] for one in stated} == {"e1"}


def test_review_forms_correction_is_sent_with_the_first_metrics_value_for_its_call() -> None:
    given = {
        "value:reward": "0",
        "value:verdict": "bad",
        "call": "c1",
        "correction": " So\r\nis it. ",
    }
    *_, stated = statements_of(given, [REWARD, VERDICT], "e1")
    assert stated == {"metric": "reward", "value": 0.0, "call": "c1", "correction": "So\nis it."}
    without = statements_of(given | {"correction": " \r\n"}, [REWARD, VERDICT], "e1")
    assert ["correction" in one for one in without] == [False, False]
    with pytest.raises(Refusal):
        statements_of({"call": "c1", "correction": "So."}, [REWARD], "e1")


@pytest.mark.parametrize("value", ["1.5", "nan", "inf", "good", "", "1e999"])
def test_review_form_with_an_invalid_metric_value_is_refused(value: str) -> None:
    with pytest.raises(Refusal):
        statements_of({"value:reward": value}, [REWARD], "e1")
