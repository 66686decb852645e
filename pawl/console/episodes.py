"""The screen Episodes: a list that follows what happens, by the filter that all views share."""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pawl.console.filters import STATES
from pawl.console.pages import Refusal, filter_of, fragment, page, reading, viewer
from store.ids import time_of
from store.read.browsing import (
    MOST_CALLS,
    EpisodeCounts,
    EpisodePage,
    browse,
    count_episodes,
)

TITLE: Final = "Episodes"
# How long to look for what a filter chooses; longer for whoever asks to look further.
LOOK_S: Final = 0.12
LOOK_FURTHER_S: Final = 2.0


async def episodes(request: Request) -> Response:
    """Show the newest episodes of a filter, or those before another."""
    shown = await _shown(request)
    return page(request, "episodes.html", states=STATES, **shown)


async def rows(request: Request) -> Response:
    """Return the list alone, for a page that follows what happens."""
    return fragment(request, "episodes_list.html", **await _shown(request))


async def _shown(request: Request) -> dict[str, Any]:
    chosen = filter_of(request)
    before = request.query_params.get("before")
    try:
        last = UUID(before) if before else None
    except ValueError as error:
        raise Refusal(
            400, "There is no such part of the list", "before: write the id of an episode."
        ) from error
    further = "further" in request.query_params
    async with reading(request) as connection:
        found: EpisodePage = await browse(
            connection,
            chosen,
            viewer(request).tenant,
            before=last,
            within_s=LOOK_FURTHER_S if further else LOOK_S,
        )
    return {
        "chosen": chosen,
        "found": found,
        "before": last,
        "most_calls": MOST_CALLS,
        "looked_to": time_of(found.goes_on_before) if found.goes_on_before else None,
    }


class Bar(NamedTuple):
    """Describe a bar of the histogram: its range of rewards, and the episodes in it."""

    low: float
    high: float
    episodes: int


async def counts(request: Request) -> Response:
    """Return how many episodes are in which state, and how their rewards are distributed."""
    chosen = filter_of(request)
    async with reading(request) as connection:
        counted = await count_episodes(connection, chosen, viewer(request).tenant)
    return fragment(
        request,
        "episodes_counts.html",
        chosen=chosen,
        counted=counted,
        bars=list(_bars(counted)),
        states=[state for state in STATES if state in counted.states],
    )


def _bars(counted: EpisodeCounts) -> Iterator[Bar]:
    width = (counted.high - counted.low) / len(counted.bars)
    for place, number in enumerate(counted.bars):
        # Sums of floats end in digits that no address should have.
        low, high = (float(f"{counted.low + width * at:.9g}") for at in (place, place + 1))
        yield Bar(low, high, number)


ROUTES: Final = [
    Route("/episodes", episodes, name="episodes"),
    Route("/episodes/rows", rows, name="episodes_rows"),
    Route("/episodes/counts", counts, name="episodes_counts"),
]
