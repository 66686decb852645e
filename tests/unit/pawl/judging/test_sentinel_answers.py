"""What a judge is shown of a sentinel, and what its answer says."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from pawl.judging.answers import Statement
from pawl.judging.errors import JudgeFailed
from pawl.judging.sentinels.shown import MOST_SCORE, digest_of_line, score_of, sentinel_line
from store.read.lines import encoded_line
from store.records import Episode, Feedback

NOW = datetime(2026, 1, 1, tzinfo=UTC)
EPISODE = Episode(id=UUID(int=1), key="e", task="t", method="header", last_call_at=NOW, calls=())


def test_the_line_is_that_of_an_episode_that_nobody_has_scored() -> None:
    said = Feedback(metric="reward", value=0.5, at=NOW)
    scored = Episode(
        **{name: getattr(EPISODE, name) for name in EPISODE.__struct_fields__}
        | {"feedback": (said,), "quarantined_reason": "since"}
    )
    first = encoded_line(EPISODE, NOW + timedelta(hours=1), timedelta(minutes=10))
    assert sentinel_line(scored) == sentinel_line(EPISODE) == first
    assert digest_of_line(first) == digest_of_line(first)
    assert digest_of_line(first) != digest_of_line(first + b" ")


@pytest.mark.parametrize(
    ("statements", "score"),
    [
        ([], None),
        ([{"value": 0.8}], 0.8),
        ([{"value": 1}], 1.0),
        ([{"value": True}], 1.0),
        ([{"metric": "style", "value": 0.2}], None),
        ([{"metric": "style", "value": "good"}, {"value": 0.4}], 0.4),
        ([{"value": 0.0, "call": str(UUID(int=1))}, {"value": 0.5}], 0.25),
    ],
)
def test_the_score_is_the_mean_of_what_is_stated(
    statements: list[Statement], score: float | None
) -> None:
    assert score_of([_about(one) for one in statements], "reward") == score


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ({"value": "good"}, "no numbers"),
        ({"value": 2 * MOST_SCORE}, "no numbers"),
        ({"value": [1]}, "/feedback would refuse"),
        ({"value": 10**400}, "/feedback would refuse"),
        ({"value": 1, "nothing": 1}, "/feedback would refuse"),
        ({"withdrawn": True, "value": 1}, "/feedback would refuse"),
    ],
)
def test_what_cannot_be_compared_is_a_failure(statement: Statement, named: str) -> None:
    with pytest.raises(JudgeFailed, match=named):
        score_of([_about(statement)], "reward")


def _about(statement: Statement) -> Statement:
    return statement if "call" in statement else statement | {"episode": "e"}
