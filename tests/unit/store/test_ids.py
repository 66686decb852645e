"""Bounds of ids by the time they were made."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from store.ids import lowest_id_at, time_of

MOMENTS = st.datetimes(datetime(2020, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))


@given(MOMENTS, st.integers(0, 2_000), st.integers(0, 2**80 - 1))
def test_lowest_id_bounds_each_id_that_is_made_from_that_moment_on(
    moment: datetime, later_us: int, random_bits: int
) -> None:
    made_at = moment + timedelta(microseconds=later_us)
    # An id has whole milliseconds, cut off (RFC 9562).
    milliseconds = int(made_at.timestamp()) * 1000 + made_at.microsecond // 1000
    assert lowest_id_at(moment) <= UUID(int=(milliseconds << 80) + random_bits)
    assert timedelta() <= moment - time_of(lowest_id_at(moment)) < timedelta(milliseconds=1)
