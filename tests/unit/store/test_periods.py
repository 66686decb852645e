"""`PAWL_KEEP_DAYS` is read whole or refused with what to write, and says each tenant's days."""

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.settings import UnreadSettings, read_settings
from proxy.settings import ProxySettings
from store.keep_days import MOST_DAYS, Cuts, Periods, read_periods

TODAY = date(2026, 11, 22)
tenants = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
days = st.none() | st.integers(1, MOST_DAYS)


def written(periods: Periods) -> str:
    said = [] if periods.others is None else [str(periods.others)]
    said += [f"{name}={number or 'forever'}" for name, number in periods.of.items()]
    return ",".join(said)


@given(days, st.dictionaries(tenants, days, min_size=1))
def test_what_is_written_is_read(others: int | None, of: dict[str, int | None]) -> None:
    periods = Periods(others=others, of=of)
    assert read_periods(written(periods)) == periods
    assert read_periods(written(periods).replace(",", " , ").replace("=", " = ")) == periods


@given(days, st.dictionaries(tenants, days), tenants)
def test_cuts_are_each_tenants_own(
    others: int | None, of: dict[str, int | None], stranger: str
) -> None:
    cuts = Periods(others=others, of=of).cuts(TODAY)
    said = [others, *of.values()]
    for tenant in (*of, stranger):
        number = of.get(tenant, others)
        cut = None if number is None else TODAY - timedelta(days=number)
        assert cuts.before(tenant) == cut
        assert cuts.apart(tenant) == (cut is not None and cut != cuts.of_all)
    known = [number for number in said if number is not None]
    assert cuts.of_any == (TODAY - timedelta(days=min(known)) if known else None)
    whole = TODAY - timedelta(days=max(known)) if len(known) == len(said) else None
    assert cuts.of_all == whole


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "'0' is no number of days"),
        ("ninety", "'ninety' is no number of days"),
        ("36501", "from 1 to 36500"),
        ("9" * 5000, "no number of days"),
        ("30,acme", "'acme' is no number of days"),
        ("acme=", "'' is no number of days"),
        ("acme=-7", "'-7' is no number of days"),
        ("ac me=7", "'ac me' cannot be a tenant's name"),
        ("=7", "'' cannot be a tenant's name"),
        ("acme=7,acme=8", "the days of acme are said twice"),
        ("30,31", "the days of everybody are said twice"),
        ("30,", "'' is no number of days"),
        ("٣٠", "no number of days"),
    ],
)
def test_a_mistake_is_named_with_what_to_write(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAWL_KEEP_DAYS", text)
    with pytest.raises(UnreadSettings, match=r"^PAWL_KEEP_DAYS: ") as refused:
        read_settings(ProxySettings)
    assert says in str(refused.value)
    assert "90,acme=7,audit=forever" in str(refused.value)


def test_a_number_alone_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAWL_KEEP_DAYS", "30")
    assert read_settings(ProxySettings).keep_days == Periods(others=30)
    monkeypatch.delenv("PAWL_KEEP_DAYS")
    assert read_settings(ProxySettings).keep_days is None


def test_bytes_that_cannot_be_read_are_their_tenants() -> None:
    cuts = Cuts(others=date(2026, 11, 1), of={"acme": date(2026, 11, 20), "default": None})
    made = date(2026, 11, 10)
    assert cuts.outdated(made, b"\x93\xa6acme\x1fe1")
    assert not cuts.outdated(made, b"torn")
    assert not cuts.outdated(made, b"other\x1fe1")
    assert cuts.outdated(date(2026, 10, 1), b"other\x1fe1 \x1fe1")
