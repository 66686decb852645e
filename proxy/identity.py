"""Whose call it is: episode, agent and task (pure).

The first that applies, each for itself: a header, then the URL's prefix; for the episode then
what the call's content repeats (`proxy.stitch`). A call without any sign gets an episode of
its own. An unusable value never fails the call: it is put aside with a warning.
"""

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

import msgspec

from proxy.dialects.base import ModelRequest
from proxy.routes import Route
from store.records import OWN_EPISODE, Confidence

HEADER_PREFIX: Final = "x-pawl-"
MAX_LENGTH: Final = 256
DEFAULT_AGENT: Final = "default"


class Identity(msgspec.Struct, frozen=True):
    """Who called, by which method that was found out, and what was wrong with the asking."""

    episode: str
    method: str
    agent: str
    task: str | None
    warnings: tuple[str, ...] = ()
    confidence: Confidence = "certain"
    asks: tuple[bytes, ...] = ()
    retry_of: UUID | None = None


class Joined(msgspec.Struct, frozen=True):
    """The episode that a call's content points to, and by which sign."""

    episode: str
    method: str


def identify(
    headers: Mapping[str, str], route: Route, request: ModelRequest, call_id: UUID, stitches: Any
) -> Identity:
    found = (
        stitches.retried(request.body)
        if headers.get("x-stainless-retry-count", "0") not in ("0",)
        else None
    )
    if found:
        joined = Joined(found, "retry")
    else:
        found = stitches.joined(request.fields)
        joined = Joined(found, "tool_call") if found else None
    return _identify(headers, route, call_id, joined)


def _identify(headers, route, call_id, joined):
    """Episode, agent and task of a call; `joined` is what its content says of its episode."""
    warnings: list[str] = []
    episode, method = _pick(headers, "episode", route.episode, warnings)
    agent, _ = _pick(headers, "agent", route.agent, warnings)
    task, _ = _pick(headers, "task", route.task, warnings)
    if episode is None and joined is not None:
        episode, method = joined.episode, joined.method
    return Identity(
        episode=episode or str(call_id),
        method=method if episode else OWN_EPISODE,
        agent=agent or DEFAULT_AGENT,
        task=task,
        warnings=tuple(warnings),
    )


def _pick(
    headers: Mapping[str, str], name: str, from_url: str | None, warnings: list[str]
) -> tuple[str | None, str]:
    header = HEADER_PREFIX + name
    for value, method, where in (
        (headers.get(header), "header", header),
        (from_url, "url", f"/{name}/ in the URL"),
    ):
        if value is None:
            continue
        wrong = _what_is_wrong(value)
        if wrong is None:
            return value, method
        warnings.append(f"{where} {wrong}; ignored")
    return None, ""


def _what_is_wrong(value: str) -> str | None:
    if not value.strip():
        return "is empty"
    if len(value) > MAX_LENGTH:
        return f"is longer than {MAX_LENGTH} characters"
    if not value.isprintable():
        return "holds unprintable characters"
    return None
