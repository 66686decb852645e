"""The screen Episodes: a list that follows what happens, by the filter that its address carries."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pawl.console.pages import Refusal, page, part, reading, uuid_in, viewer
from store.ids import time_of
from store.read.browsing import (
    LONGEST_NAME,
    MOST_CALLS,
    EpisodeFilter,
    State,
    browse,
    count_episodes,
)
from store.records import SPLITS

# How long to look for what a filter chooses; longer for whoever asks to look further.
LOOK_S: Final = 0.08
LOOK_FURTHER_S: Final = 2.0
STATES: Final[tuple[State, ...]] = get_args(State)


def _time(text: str) -> datetime:
    """Read a time; one without a zone is UTC's: the server does not know the viewer's."""
    moment = datetime.fromisoformat(text)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    if not datetime(1970, 1, 1, tzinfo=UTC) <= moment < datetime(9999, 1, 1, tzinfo=UTC):
        raise ValueError("no id is of this time")
    return moment


# By what a field of an address is read, and how to write it. Those not in `READERS` are names.
NAME: Final = (str, f"at most {LONGEST_NAME} characters, without U+0000")
REWARD: Final = (float, "a number, such as 0.5")
TIME: Final = (_time, "a time from 1970 on, such as 2026-11-26T12:00")
READERS: Final[Mapping[str, tuple[Callable[[str], Any], str]]] = {
    "version": (int, "the number of a version, such as 3"),
    "split": (str, f"one of {', '.join(SPLITS)}"),
    "state": (str, f"one of {', '.join(STATES)}"),
    "low": REWARD,
    "high": REWARD,
    "since": TIME,
    "until": TIME,
}


class Filter(EpisodeFilter, frozen=True, kw_only=True):
    """Choose episodes as an address does, such as `?policy=m&state=scored&low=0.5`."""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> "Filter":
        """Read the filter in an address; other parameters are ignored, and so are empty ones.

        Raises:
            Refusal: a field cannot be used; it says how to write it.
        """
        values = {}
        for field in msgspec.structs.fields(cls):
            read, how = READERS.get(field.name, NAME)
            if text := parameters.get(field.name, "").strip():
                try:
                    values[field.name] = msgspec.convert(read(text), field.type)
                except ValueError as error:
                    title = "This filter cannot be used"
                    raise Refusal(400, title, f"{field.name}: write {how}.") from error
        return cls(**values)

    def query(self, **changes: Any) -> dict[str, str]:
        """Return the parameters of an address with this filter, or with other values of fields.

        None takes a field out.
        """
        values = msgspec.to_builtins(self) | changes
        return {name: str(value) for name, value in values.items() if value is not None}


async def episodes(request: Request) -> Response:
    """Show the newest episodes of a filter, or those before another."""
    chosen = Filter.of(request.query_params)
    before = uuid_in(request.query_params.get("before"))
    if before is None and "before" in request.query_params:
        title = "There is no such part of the list"
        raise Refusal(400, title, "before: write the id of an episode.")
    within_s = LOOK_FURTHER_S if "further" in request.query_params else LOOK_S
    async with reading(request) as connection:
        tenant = viewer(request).tenant
        listed = await browse(connection, chosen, tenant, before=before, within_s=within_s)
    return page(
        request,
        "episodes.html",
        states=STATES,
        chosen=chosen,
        listed=listed,
        before=before,
        most_calls=MOST_CALLS,
        looked_to=time_of(listed.goes_on_before) if listed.goes_on_before else None,
    )


async def counts(request: Request) -> Response:
    """Return how many episodes are in which state, and how their rewards are distributed."""
    chosen = Filter.of(request.query_params)
    async with reading(request) as connection:
        counted = await count_episodes(connection, chosen, viewer(request).tenant)
    return part(request, "episodes_counts.html", chosen=chosen, counted=counted, states=STATES)


ROUTES: Final = [
    Route("/episodes", episodes, name="episodes"),
    Route("/episodes/counts", counts, name="episodes_counts"),
]
