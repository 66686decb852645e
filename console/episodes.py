"""The screen Episodes: a live list, by the filter in its address."""

import asyncio
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Final, get_args
from uuid import UUID

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from console.conversation import NO_TEXTS, answer_in, question_in, turn_of
from console.pages import Refusal, page, part, reading, uuid_in, viewer_of
from store.ids import time_of
from store.read.browsing import (
    LONGEST_NAME,
    MOST_CALLS,
    EpisodeFilter,
    State,
    browse,
    count_episodes,
)
from store.read.detail import CallTexts, call_texts, first_and_last_calls
from store.records import SPLITS

# How long to search for episodes that match a filter; longer on request.
LOOK_S: Final = 0.08
LOOK_FURTHER_S: Final = 2.0
# Characters of a question or an answer in the list; a body of more bytes is not searched for one.
LISTED_CHARACTERS: Final = 120
LARGEST_LISTED_BYTES: Final = 128 * 1024
STATES: Final[tuple[State, ...]] = get_args(State)


def _parse_time(text: str) -> datetime:
    """Parse a time; without a zone it is UTC, as the server does not know the viewer's zone."""
    moment = datetime.fromisoformat(text)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    if not datetime(1970, 1, 1, tzinfo=UTC) <= moment < datetime(9999, 1, 1, tzinfo=UTC):
        raise ValueError("no id is of this time")
    return moment


# How to write each field of an address; fields that are not in FORMATS are names.
NAME_FORMAT: Final = f"at most {LONGEST_NAME} characters, without U+0000"
REWARD_FORMAT: Final = "a number, such as 0.5"
TIME_FORMAT: Final = "a time from 1970 on, such as 2026-11-26T12:00"
FORMATS: Final = {
    "version": "the number of a version, such as 3",
    "split": f"one of {', '.join(SPLITS)}",
    "state": f"one of {', '.join(STATES)}",
    "low": REWARD_FORMAT,
    "high": REWARD_FORMAT,
    "since": TIME_FORMAT,
    "until": TIME_FORMAT,
}


class Filter(EpisodeFilter, frozen=True, kw_only=True):
    """The filter of an address, such as `?policy=m&state=scored&low=0.5`."""

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> "Filter":
        """Read the filter in an address; other and empty parameters are ignored.

        Raises:
            Refusal: a field is invalid; the page says how to write it.
        """
        values = {}
        for field in msgspec.structs.fields(cls):
            if text := parameters.get(field.name, "").strip():
                how = FORMATS.get(field.name, NAME_FORMAT)
                try:
                    value = _parse_time(text) if how is TIME_FORMAT else text
                    values[field.name] = msgspec.convert(value, field.type, strict=False)
                except ValueError as error:
                    title = "This filter cannot be used"
                    raise Refusal(400, title, f"{field.name}: write {how}.") from error
        return cls(**values)

    def query(self, **changes: Any) -> dict[str, str]:
        """Return this filter with `changes` as parameters of an address; None drops a field."""
        values = msgspec.to_builtins(self) | changes
        return {name: str(value) for name, value in values.items() if value is not None}


async def first_and_last_words(
    connection: AsyncConnection, episodes: Collection[UUID]
) -> dict[UUID, tuple[str, str]]:
    """Return the shortened first question and last answer of each episode."""
    ends = await first_and_last_calls(connection, episodes)
    firsts, lasts = [row.first for row in ends], [row.last for row in ends]
    texts = await call_texts(connection, firsts, lasts, LARGEST_LISTED_BYTES)

    def first_question_and_last_answer(row: Row[Any]) -> tuple[str, str]:
        first, last = (texts.get(call, NO_TEXTS) for call in (row.first, row.last))
        turn = turn_of(CallTexts(first.request, last.reply))
        return last_characters(question_in(turn)), last_characters(answer_in(turn))

    return await asyncio.to_thread(
        lambda: {row.episode: first_question_and_last_answer(row) for row in ends}
    )


def last_characters(words: str) -> str:
    """Return a text in one line; of a long one, the last LISTED_CHARACTERS characters."""
    line = " ".join(words.split())
    return line if len(line) <= LISTED_CHARACTERS else f"… {line[-LISTED_CHARACTERS:]}"


async def episodes(request: Request) -> Response:
    """Show the newest episodes that match a filter, or those before a given episode."""
    chosen = Filter.from_parameters(request.query_params)
    before = uuid_in(request.query_params.get("before"))
    if before is None and "before" in request.query_params:
        title = "There is no such part of the list"
        raise Refusal(400, title, "before: write the id of an episode.")
    within_s = LOOK_FURTHER_S if "further" in request.query_params else LOOK_S
    async with reading(request) as connection:
        tenant = viewer_of(request).tenant
        listed = await browse(connection, chosen, tenant, before=before, within_s=within_s)
        words = await first_and_last_words(connection, {line.id for line in listed.lines})
    return page(
        request,
        "episodes.html",
        states=STATES,
        chosen=chosen,
        listed=listed,
        words=words,
        before=before,
        most_calls=MOST_CALLS,
        looked_to=time_of(listed.goes_on_before) if listed.goes_on_before else None,
    )


async def counts(request: Request) -> Response:
    """Return how many episodes are in which state, and how their rewards are distributed."""
    chosen = Filter.from_parameters(request.query_params)
    async with reading(request) as connection:
        counted = await count_episodes(connection, chosen, viewer_of(request).tenant)
    return part(request, "episodes_counts.html", chosen=chosen, counted=counted, states=STATES)


ROUTES: Final = [
    Route("/episodes", episodes, name="episodes"),
    Route("/episodes/counts", counts, name="episodes_counts"),
]
