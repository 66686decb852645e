"""The filter that an address carries."""

from datetime import UTC, datetime
from urllib.parse import parse_qsl, urlencode

import pytest

from pawl.console.filters import BadFilter, Filter


def test_filter_is_read_back_from_its_address() -> None:
    chosen = Filter(
        policy="m",
        version=3,
        agent="plan & do",
        task="tests/1",
        split="eval",
        state="scored",
        reason="stale",
        low=-0.5,
        high=1.0,
        since=datetime(2026, 11, 26, 12, tzinfo=UTC),
        until=datetime(2026, 11, 27, tzinfo=UTC),
        text='"ümläut" <b>',
    )
    assert Filter.of(dict(parse_qsl(urlencode(chosen.query())))) == chosen
    assert Filter.of(chosen.query(policy=None, low=None, state="open")) == Filter.of(
        chosen.query() | {"policy": "", "low": " ", "state": "open"}
    )
    assert Filter.of({"before": "x", "policy": " "}) == Filter()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"version": "three"}, "version: 'three' is no version"),
        ({"version": "99999999999"}, "version"),
        ({"low": "nan"}, "low: 'nan' is no number"),
        ({"high": "inf"}, "high"),
        ({"low": "1", "high": "0"}, "low: write a number that is no greater than high"),
        ({"since": "yesterday"}, "since: 'yesterday' is no time"),
        ({"until": "0001-01-01"}, "until: write a time from 1970 on"),
        ({"state": "lost"}, "state: 'lost' is unknown; write one of open, "),
        ({"split": "test"}, "split"),
        ({"policy": "m" * 600}, "policy: write at most 512 characters"),
        ({"text": "a\0b"}, "text: leave out the character"),
    ],
)
def test_field_that_cannot_be_used_is_named_with_the_remedy(
    given: dict[str, str], said: str
) -> None:
    with pytest.raises(BadFilter) as refused:
        Filter.of(given)
    assert str(refused.value).startswith(said)
