"""Whose call it is: episode, agent and task (pure).

The first that applies, each for itself: our headers, our URL; then the names that tools and
frameworks give their sessions (`proxy.identity.names`). A call whose episode has no name joins the
attempt it repeats, or the episode whose reply it repeats (`proxy.identity.stitch`), or the trace it
is part of; and else it is an episode of its own. An unusable value never fails the call: it
is put aside with a warning. `user` is never read: it names a person, not a run.

What is joined here is joined by what can have one source only. Anything else goes to the
ledger as an episode of its own with what it asks for (`Identity.asks`): there the offers of
all proxies are known, and only there can it be seen that nobody else made one.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Final
from uuid import UUID

import msgspec

from proxy.identity.baggage import trace_id
from proxy.identity.conversation import Conversation, read_conversation
from proxy.identity.names import Name, Told, episode_names, read_told, what_is_wrong
from proxy.identity.signs import asks_of
from proxy.identity.stitch import Doubt, Joined, Stitches
from proxy.routes import Route
from store.records import OWN_EPISODE, Confidence

HEADER_PREFIX: Final = "x-pawl-"
RETRY_COUNT: Final = "x-stainless-retry-count"
DEFAULT_AGENT: Final = "default"
_LONGEST_COUNT: Final = 3


class Identity(msgspec.Struct, frozen=True):
    """Who called, by which method that was found out, how surely, and what was wrong.

    `asks` is what the ledger is to join by. `follows` is the episode whose policy version the
    call is to keep: its own, or the one that this proxy saw it go on from most likely (to be
    wrong about it costs nothing, for any live version may answer). `conversation` is the
    request's as far as it was read, for `offers_of`.
    """

    episode: str
    method: str
    agent: str
    task: str | None
    follows: str = ""
    warnings: tuple[str, ...] = ()
    confidence: Confidence = "certain"
    asks: tuple[bytes, ...] = ()
    retry: int = 0
    retry_of: UUID | None = None
    conversation: Conversation | None = None


class _Episode(msgspec.Struct, frozen=True):
    key: str
    method: str
    confidence: Confidence = "certain"
    asks: tuple[bytes, ...] = ()
    follows: str | None = None
    retry_of: UUID | None = None


def identify(
    headers: Mapping[str, str],
    route: Route,
    fields: dict[str, Any],
    body: bytes,
    call: str,
    stitches: Stitches,
    said: Conversation | None = None,
) -> Identity:
    """Episode, agent and task of a call.

    Args:
        headers: looked up in lower case.
        route: what the URL's prefix names.
        fields: the request's, parsed; empty if it is no JSON object.
        body: its bytes; looked at only where they may repeat an attempt.
        call: its id, which names the episode where nothing else does.
        stitches: what this proxy remembers of earlier calls.
        said: the request's conversation, if it was read already.
    """
    warnings: list[str] = []
    told = read_told(headers, fields)
    retry = retry_count(headers)
    names = chain(_ours(headers, "episode", route.episode), episode_names(told, fields))
    name = _first_usable(names, warnings)
    if name is not None:
        episode = _named(name, body if retry else None, stitches)
    else:
        said = said or read_conversation(fields)
        asks = asks_of(route.dialect or "", fields, said)
        episode = _unnamed(headers, asks, body if retry else None, call, stitches)
    agent = _role(headers, "agent", route.agent, told, told.agents(), warnings)
    return Identity(
        episode=episode.key,
        method=episode.method,
        agent=agent or DEFAULT_AGENT,
        task=_role(headers, "task", route.task, told, (), warnings),
        follows=episode.follows or episode.key,
        warnings=tuple(warnings),
        confidence=episode.confidence,
        asks=episode.asks,
        retry=retry,
        retry_of=episode.retry_of,
        conversation=said,
    )


def retry_count(headers: Mapping[str, str]) -> int:
    """How often an SDK says it has sent this request before; 0 where it says nothing."""
    value = headers.get(RETRY_COUNT, "0")
    return int(value) if value.isdecimal() and len(value) <= _LONGEST_COUNT else 0


def _named(name: Name, repeated: bytes | None, stitches: Stitches) -> _Episode:
    attempt = None if repeated is None else stitches.retried(repeated, name.key)
    return _Episode(name.key, name.method, retry_of=attempt.call_id if attempt else None)


def _unnamed(
    headers: Mapping[str, str],
    asks: tuple[bytes, ...],
    repeated: bytes | None,
    own: str,
    stitches: Stitches,
) -> _Episode:
    """The episode of a call that names none, from what it repeats."""
    found = stitches.find(asks)
    follows = found.follows if isinstance(found, Joined) else stitches.followed(asks)
    attempt = None if repeated is None else stitches.retried(repeated)
    if attempt is not None:
        return _Episode(attempt.episode, "retry", "likely", (), follows, attempt.call_id)
    if isinstance(found, Joined):
        return _Episode(found.episode, found.method, found.confidence, (), follows)
    if isinstance(found, Doubt):
        return _Episode(own, OWN_EPISODE, "doubtful", asks)
    if asks:
        return _Episode(own, OWN_EPISODE, "likely", asks, follows)
    parent = headers.get("traceparent")
    trace = None if parent is None else trace_id(parent)
    if trace is not None:
        return _Episode(f"trace:{trace}", "trace", "likely")
    return _Episode(own, OWN_EPISODE)


def _role(
    headers: Mapping[str, str],
    role: str,
    from_url: str | None,
    told: Told,
    others: Iterable[Name],
    warnings: list[str],
) -> str | None:
    """The agent or the task: ours first, then what tools tell."""
    ours = _ours(headers, role, from_url)
    if not (ours or others or told.metadata or told.baggage):
        return None
    name = _first_usable(chain(ours, told.own(role), others), warnings)
    return None if name is None else name.key


def _ours(headers: Mapping[str, str], role: str, from_url: str | None) -> list[Name]:
    """Our header, then our URL."""
    header = HEADER_PREFIX + role
    value = headers.get(header)
    names = [] if value is None else [Name(value, "header", header)]
    if from_url is not None:
        names.append(Name(from_url, "url", f"/{role}/ in the URL"))
    return names


def _first_usable(names: Iterable[Name], warnings: list[str]) -> Name | None:
    """The first name that can be one; of those before it, a warning each."""
    for name in names:
        wrong = what_is_wrong(name.value)
        if wrong is None:
            return name
        warnings.append(f"{name.where} {wrong}; ignored")
    return None
