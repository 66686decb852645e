"""What `pawl policies rebuild --without` understands."""

from datetime import UTC, datetime
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.commands.rebuilding import Without
from pawl.policies.queries import FIELDS, BadQuery, read_queries, read_query
from store.rebuilding.choosing import Query


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("e7", Query(episode="e7")),
        ("a=b,c", Query(episode="a=b,c")),
        ("episode=task=x", Query(episode="task=x")),
        ("task=a,b", Query(task="a,b")),
        ("task=a,b,agent=c", Query(task="a,b", agent="c")),
        ("prefix=user-42/", Query(prefix="user-42/")),
        (
            "since=2026-11-20T10:00+00:00,before=2026-11-21T00:00Z",
            Query(
                since=datetime(2026, 11, 20, 10, tzinfo=UTC),
                before=datetime(2026, 11, 21, tzinfo=UTC),
            ),
        ),
        ("scored-since=2026-11-20", Query(scored_since=datetime(2026, 11, 20).astimezone())),
    ],
)
def test_understood(text: str, query: Query) -> None:
    assert read_query(text) == query
    assert read_queries([text, "e1"]) == (query, Query(episode="e1"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "episode: the value is missing"),
        ("task=", "task: the value is missing: write task=VALUE"),
        ("task=a,task=b", "task: it comes twice"),
        ("episode=e1,task=a", "episode: a name selects one episode"),
        ("since=noon", "since: 'noon' is no time: write it as 2026-11-22"),
        ("scored-before=2026-13-01", "scored-before: '2026-13-01' is no time"),
    ],
)
def test_refused_with_the_field_and_the_remedy(text: str, said: str) -> None:
    with pytest.raises(BadQuery, match=said):
        read_query(text)


@given(st.text())
def test_any_text_is_a_query_or_is_refused(text: str) -> None:
    try:
        read = read_query(text)
    except BadQuery:
        return
    assert read != Query()


def test_the_option_s_help_names_all_conditions() -> None:
    [option] = [one for one in get_args(Without) if hasattr(one, "help")]
    _, _, conditions = option.help.partition("FIELD=VALUE,...: ")
    assert conditions.partition(".")[0].split(", ") == [one for one in FIELDS if one != "episode"]
