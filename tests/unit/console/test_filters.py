"""The filter that an address carries."""

from datetime import UTC, datetime
from urllib.parse import parse_qsl, urlencode

import pytest

from console.episodes import Filter
from console.pages import Refusal


def test_episode_filter_is_read_back_from_its_url_query() -> None:
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
    assert Filter.from_parameters(dict(parse_qsl(urlencode(chosen.query())))) == chosen
    assert Filter.from_parameters(
        chosen.query(policy=None, low=None, state="open")
    ) == Filter.from_parameters(chosen.query() | {"policy": "", "low": " ", "state": "open"})
    assert Filter.from_parameters({"before": "x", "policy": " "}) == Filter()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"version": "three"}, "version: write the number of a version, such as 3"),
        ({"version": "99999999999"}, "version"),
        ({"version": "-1"}, "version"),
        ({"low": "nan"}, "low: write a number, such as 0.5"),
        ({"high": "inf"}, "high"),
        ({"high": "1e400"}, "high"),
        ({"since": "yesterday"}, "since: write a time from 1970 on, such as 2026-11-26T12:00"),
        ({"until": "0001-01-01"}, "until: write a time from 1970 on"),
        ({"since": "1970-01-01T00:00+12:00"}, "since"),
        ({"state": "lost"}, "state: write one of open, "),
        ({"split": "test"}, "split"),
        ({"policy": "m" * 600}, "policy: write at most 512 characters"),
        ({"text": "a\0b"}, "text: write at most 512 characters, without U+0000"),
    ],
)
def test_unusable_field_of_an_episode_filter_is_refused_with_the_remedy(
    given: dict[str, str], said: str
) -> None:
    with pytest.raises(Refusal) as refused:
        Filter.from_parameters(given)
    assert (refused.value.status_code, refused.value.detail[: len(said)]) == (400, said)


def test_filter_time_without_a_zone_is_utc() -> None:
    assert Filter.from_parameters({"since": "2026-11-26T12:00"}).since == datetime(
        2026, 11, 26, 12, tzinfo=UTC
    )
