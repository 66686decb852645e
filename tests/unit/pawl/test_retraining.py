"""What `pawl policies retrain --without` understands, and what the command says."""

from datetime import UTC, datetime

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from pawl.commands.policies import app
from pawl.operator_moves import QUERY_FIELDS, BadQuery, describe_retrained, read_query
from store.retraining import Retrained
from store.selecting import Selection


@pytest.mark.parametrize(
    ("query", "read"),
    [
        ("e7", "e7"),
        ("a=b,c", "a=b,c"),
        ("episode=task=x", "task=x"),
        ("task=a,b", Selection(task="a,b")),
        ("task=a,b,agent=c", Selection(task="a,b", agent="c")),
        ("prefix=user-42/", Selection(prefix="user-42/")),
        (
            "since=2026-11-20T10:00+00:00,before=2026-11-21T00:00Z",
            Selection(
                since=datetime(2026, 11, 20, 10, tzinfo=UTC),
                begun_before=datetime(2026, 11, 21, tzinfo=UTC),
            ),
        ),
        (
            "scored-since=2026-11-20",
            Selection(scored_since=datetime(2026, 11, 20).astimezone()),
        ),
    ],
)
def test_retrain_query_is_an_episode_name_or_conditions(query: str, read: str | Selection) -> None:
    assert read_query(query) == read


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "episode: write episode=VALUE, with a value"),
        ("task=", "task: write task=VALUE"),
        ("task=a,task=b", "task: it comes twice"),
        ("episode=e1,task=a", "episode: a name selects one episode"),
        ("since=noon", "since: 'noon' is no time: write it as 2026-11-22"),
        ("scored-before=2026-13-01", "scored-before: '2026-13-01' is no time"),
    ],
)
def test_bad_retrain_query_is_refused_with_the_field_and_the_remedy(
    query: str, message: str
) -> None:
    with pytest.raises(BadQuery, match=message):
        read_query(query)


@given(st.text())
def test_any_text_is_a_retrain_query_or_is_refused(query: str) -> None:
    try:
        assert read_query(query) not in ("", Selection())
    except BadQuery:
        return


def test_help_of_retrain_names_all_query_conditions() -> None:
    policies = typer.main.get_group(app)
    [option] = [one for one in policies.commands["retrain"].params if one.name == "without"]
    _, _, conditions = str(getattr(option, "help", "")).partition("FIELD=VALUE,...: ")
    assert conditions.partition(".")[0].split(", ") == [
        one for one in QUERY_FIELDS if one != "episode"
    ]


def test_result_names_the_serving_version_and_freed_episodes() -> None:
    retrained = Retrained(
        serves="m@5",
        served="m@12",
        freed={"trained": 40, "stale": 2},
        left_out=3,
        learned=1,
        ended=7,
        max_staleness=4,
    )
    assert describe_retrained(retrained, dry=False).splitlines() == [
        "m@5 serves in place of m@12; versions ended: 7; episodes freed: 2 stale, 40 trained;"
        " episodes left out: 3",
        "m@5 learned from 1 of the episodes to leave out: start at an earlier version",
        "claim.max_staleness is 4: once the new line has that many versions, freed episodes that"
        " still wait expire; raise it until they are trained",
    ]
    none = Retrained(serves="m@5", served="m@5", freed={}, left_out=0, learned=0)
    assert describe_retrained(none, dry=True) == (
        "m@5 would serve; versions ended: 0; episodes freed: none; episodes left out: 0"
    )
