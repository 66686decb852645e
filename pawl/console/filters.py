"""Choose episodes: the filter that all views share and every address carries (pure)."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, get_args

import msgspec

from store.read.browsing import EpisodeFilter, State
from store.records import SPLITS

# Of each field of text; names that clients give are no longer.
LONGEST: Final = 512
STATES: Final[tuple[State, ...]] = get_args(State)


class BadFilter(ValueError):
    """Report a field of a filter that cannot be used, and how to write it."""


class Filter(EpisodeFilter, frozen=True, kw_only=True):
    """Choose episodes as an address does, such as `?policy=m&state=scored&low=0.5`."""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> "Filter":
        """Read the filter in an address; other parameters are ignored, and so are empty ones.

        Raises:
            BadFilter: a field cannot be used; the message names it.
        """
        given = {
            name: parameters[name].strip() for name in FIELDS if parameters.get(name, "").strip()
        }
        values: dict[str, Any] = {}
        for name, text in given.items():
            if len(text) > LONGEST:
                raise BadFilter(f"{name}: write at most {LONGEST} characters")
            if "\0" in text:
                raise BadFilter(f"{name}: leave out the character U+0000")
            values[name] = READERS[name](name, text) if name in READERS else text
        if values.get("low", -float("inf")) > values.get("high", float("inf")):
            raise BadFilter("low: write a number that is no greater than high")
        return cls(**values)

    def query(self, **changes: Any) -> dict[str, str]:
        """Return the parameters of an address with this filter, or with other values of fields.

        None takes a field out.
        """
        values = msgspec.structs.asdict(self) | changes
        return {
            name: value.isoformat() if isinstance(value, datetime) else f"{value}"
            for name, value in values.items()
            if value is not None
        }


FIELDS: Final = Filter.__struct_fields__


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not abs(number) < float("inf"):
        raise BadFilter(f"{name}: {text!r:.40} is no number; write one such as 0.5")
    return number


def _version(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadFilter(f"{name}: {text!r:.40} is no version; write its number, such as 3")
    return int(text)


def _time(name: str, text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadFilter(
            f"{name}: {text!r:.40} is no time; write one such as 2026-11-26T12:00"
        ) from error
    # A time without a zone is UTC's: the server does not know the viewer's.
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    if not 1970 <= moment.year <= 9998:
        raise BadFilter(f"{name}: write a time from 1970 on")
    return moment


def _one_of(*values: str) -> Any:
    def read(name: str, text: str) -> str:
        if text not in values:
            raise BadFilter(f"{name}: {text!r:.40} is unknown; write one of {', '.join(values)}")
        return text

    return read


READERS: Final[dict[str, Any]] = {
    "version": _version,
    "split": _one_of(*SPLITS),
    "state": _one_of(*STATES),
    "low": _number,
    "high": _number,
    "since": _time,
    "until": _time,
}
