"""Say for how many days each tenant's records are kept, and from which day on (pure)."""

import re
from collections.abc import Mapping
from datetime import date, timedelta
from typing import Final

from store.records import Record
from store.tenants import DEFAULT, PATTERN, SEPARATOR, beginning

FOREVER: Final = "forever"
# A hundred years.
MOST_DAYS: Final = 36_500
HOW: Final = (
    "write the number of days that everybody's records are kept, such as 90, and TENANT=DAYS for "
    f"tenants of which others are, all comma-separated, as in 90,acme=7,audit={FOREVER}"
)
# Stands for a tenant that is not named.
UNNAMED: Final = ""
_TENANT: Final = re.compile(PATTERN)


class Cuts(Record, frozen=True, kw_only=True):
    """Hold the first day (UTC) of which each tenant's records are kept; None: all of them are.

    Attributes:
        others: that of the tenants that `of` does not name.
        of: that of these tenants.
    """

    others: date | None = None
    of: Mapping[str, date | None] = {}

    def before(self, tenant: str) -> date | None:
        """Return the first day of which a tenant's records are kept."""
        return self.of.get(tenant, self.others)

    @property
    def of_all(self) -> date | None:
        """Return the day before which nobody's records are kept; None: somebody's always are."""
        cuts = [cut for cut in self._all() if cut is not None]
        return min(cuts) if len(cuts) == len(self._all()) else None

    @property
    def of_any(self) -> date | None:
        """Return the day before which somebody's records are not kept; None: all always are."""
        return max((cut for cut in self._all() if cut is not None), default=None)

    def apart(self, tenant: str) -> bool:
        """Return whether days are kept for others whose records of this tenant are not."""
        cut = self.before(tenant)
        return cut is not None and cut != self.of_all

    def _all(self) -> tuple[date | None, ...]:
        return (self.others, *self.of.values())

    def outdated(self, made: date, payload: bytes) -> bool:
        """Return whether bytes that cannot be read, made on a day, hold an outdated tenant's name.

        What stands before a name cannot be told from it, so that a tenant whose name ends like a
        named one's is taken for that. Those that hold no tenant's name are the default one's.
        """
        begins = {tenant: beginning(tenant) for tenant in self.of}
        tenants = {one for one, begin in begins.items() if begin and begin.encode() in payload}
        if not tenants:
            tenants = {UNNAMED if SEPARATOR.encode() in payload else DEFAULT}
        return any(is_before(made, self.before(tenant)) for tenant in tenants)


class Periods(Record, frozen=True, kw_only=True):
    """Hold for how many days records are kept; None: for ever.

    Attributes:
        others: the days of the tenants that `of` does not name.
        of: the days of these tenants.
    """

    others: int | None = None
    of: Mapping[str, int | None] = {}

    def cuts(self, today: date) -> Cuts:
        """Return from which day on records are kept, on `today` (UTC)."""
        return Cuts(
            others=_cut(today, self.others),
            of={tenant: _cut(today, days) for tenant, days in self.of.items()},
        )


def is_before(made: date, cut: date | None) -> bool:
    """Return whether a day is before the first one that is kept; None: all days are kept."""
    return cut is not None and made < cut


def _cut(today: date, days: int | None) -> date | None:
    return None if days is None else today - timedelta(days=days)


def read_periods(text: str) -> Periods:
    """Read the value of `PAWL_KEEP_DAYS`: `90`, or `90,acme=7,audit=forever`.

    Raises:
        ValueError: it is none; the message says what to write.
    """
    others: int | None = None
    of: dict[str, int | None] = {}
    seen: set[str] = set()
    for part in text.split(","):
        tenant, named, written = (word.strip() for word in part.rpartition("="))
        if named and _TENANT.fullmatch(tenant) is None:
            raise ValueError(f"{tenant!r:.80} cannot be a tenant's name: {HOW}")
        days = _days(written)
        if tenant in seen:
            whose = f"of {tenant}" if named else "of everybody"
            raise ValueError(f"the days {whose} are said twice in {text!r:.80}: {HOW}")
        seen.add(tenant)
        if named:
            of[tenant] = days
        else:
            others = days
    return Periods(others=others, of=of)


def _days(text: str) -> int | None:
    if text == FOREVER:
        return None
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= MOST_DAYS:
        raise ValueError(f"{text!r:.80} is no number of days from 1 to {MOST_DAYS}: {HOW}")
    return int(text)
