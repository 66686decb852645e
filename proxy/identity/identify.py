"""Identify the episode, agent, task and split of a call (pure).

Each of the four comes from the first source that names it: our headers, our URL, then the names
that tools and frameworks give their sessions (`proxy.identity.names`). A call without an episode's
name joins the attempt it repeats, or the episode whose reply it repeats
(`proxy.identity.call_memory`), or the trace it is part of. Otherwise it is an episode of its own.
An unusable value never fails the call: it is ignored with a warning. `user` is never read: it names
a person, not a run.

Calls are joined here only by what can have a single source. All others go to the ledger as episodes
of their own, with the fingerprints that they need (`CallIdentity.needs`): only the ledger knows
what all proxies provided, and can see that nobody else provided the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Final
from uuid import UUID

import msgspec

from proxy.formats.base import ModelRequest
from proxy.formats.conversation import Conversation
from proxy.identity.call_memory import CallMemory, Doubt, Joined, needed_fingerprints
from proxy.identity.names import (
    EVAL_TASKS,
    Name,
    SessionHints,
    episode_names,
    read_hints,
    split_of,
    trace_id,
    what_is_wrong,
)
from proxy.routing import Route
from store.records import OWN_EPISODE, TRAIN, Confidence, Split
from store.tenants import bare, own_digests, same_tenant, tenant_of

HEADER_PREFIX: Final = "x-pawl-"
_HEADERS: Final = {role: HEADER_PREFIX + role for role in ("episode", "agent", "task", "split")}
RETRY_COUNT: Final = "x-stainless-retry-count"
DEFAULT_AGENT: Final = "default"
_LONGEST_COUNT: Final = 3


class CallIdentity(msgspec.Struct, frozen=True):
    """State a call's episode, agent, task and split; how the episode was found, and how surely.

    `needs` are the fingerprints that the ledger joins by. `follows` is the episode whose policy
    version the call keeps: its own, or the one that this proxy believes it continues (a wrong guess
    costs nothing, for any live version may answer). `conversation` is the request's, if it was
    read, for `provided_fingerprints`. Episodes and task are names as they are kept
    (`store.tenants`), but `name`, which is the episode's as its client knows it.
    """

    episode: str
    name: str
    method: str
    agent: str
    task: str | None
    follows: str = ""
    warnings: tuple[str, ...] = ()
    confidence: Confidence = "certain"
    needs: tuple[bytes, ...] = ()
    retry: int = 0
    retry_of: UUID | None = None
    conversation: Conversation | None = None
    split: Split = TRAIN


class _Episode(msgspec.Struct, frozen=True):
    key: str
    method: str
    confidence: Confidence = "certain"
    needs: tuple[bytes, ...] = ()
    follows: str | None = None
    retry_of: UUID | None = None


def identify(
    headers: Mapping[str, str],
    route: Route,
    request: ModelRequest,
    own: str,
    stitches: CallMemory,
    conversation: Conversation | None = None,
    eval_tasks: str = EVAL_TASKS,
) -> CallIdentity:
    """Return the identity of a call: its episode, agent, task and split.

    Args:
        headers: the request's, by lower-case name.
        route: names from the URL's prefix.
        request: the request; its body is read only if it may repeat an earlier attempt.
        own: the name, as it is kept, of the episode that the call has if nothing else names one:
            it tells the call's tenant, whose are all names of the call.
        stitches: what this proxy remembers of earlier calls.
        conversation: the request's, if it was read already.
        eval_tasks: how the names of tasks begin whose episodes are evaluation.
    """
    warnings: list[str] = []
    hints = read_hints(headers, request.fields)
    retry = retry_count(headers)
    task = _role(headers, "task", route.task, hints, (), warnings)
    split = _split(headers, route, hints.own("split"), task, eval_tasks, warnings)
    names = chain(_ours(headers, "episode", route.episode), episode_names(hints, request.fields))
    name = _first_usable(names, warnings)
    if name is not None:
        episode = _named(name, request.body if retry else None, own, split, stitches)
    else:
        conversation = conversation or route.speaks.turns.read(request.fields)
        needs = needed_fingerprints(route.speaks.turns, request.fields, conversation)
        episode = _unnamed(headers, needs, request.body if retry else None, own, split, stitches)
    agent = _role(headers, "agent", route.agent, hints, hints.agents(), warnings)
    return CallIdentity(
        episode=episode.key,
        name=bare(episode.key),
        method=episode.method,
        agent=agent or DEFAULT_AGENT,
        task=None if task is None else same_tenant(own, task),
        split=split,
        follows=episode.follows or episode.key,
        warnings=tuple(warnings),
        confidence=episode.confidence,
        needs=episode.needs,
        retry=retry,
        retry_of=episode.retry_of,
        conversation=conversation,
    )


def identity_alone(
    own: str,
    name: str,
    route: Route,
    headers: Mapping[str, str] | None = None,
    eval_tasks: str = EVAL_TASKS,
) -> CallIdentity:
    """Return the identity of a call whose body was not read: an episode of its own.

    Args:
        own: the episode's name, as it is kept.
        name: the same, as the client knows it.
        route: names from the URL's prefix.
        headers: the request's, by lower-case name, where they are to tell the split.
        eval_tasks: how the names of tasks begin whose episodes are evaluation.
    """
    task = None if route.task is None else same_tenant(own, route.task)
    split = TRAIN if headers is None else split_outside(headers, route, eval_tasks)
    return CallIdentity(own, name, OWN_EPISODE, DEFAULT_AGENT, task, split=split)


def split_outside(headers: Mapping[str, str], route: Route, eval_tasks: str) -> Split:
    """Return the split of a call whose body cannot be read: what headers and URL say of it."""
    return _split(headers, route, (), headers.get(_HEADERS["task"], route.task), eval_tasks, [])


def _split(
    headers: Mapping[str, str],
    route: Route,
    others: Iterable[Name],
    task: str | None,
    eval_tasks: str,
    warnings: list[str],
) -> Split:
    """Return the split of a call: from our header or URL first, then from `others`."""
    names = chain(_ours(headers, "split", route.split), others)
    return split_of(names, task, eval_tasks, warnings)


def retry_count(headers: Mapping[str, str]) -> int:
    """Return how often an SDK says it has sent this request before; 0 if it says nothing."""
    value = headers.get(RETRY_COUNT)
    if value is None:
        return 0
    return int(value) if value.isdecimal() and len(value) <= _LONGEST_COUNT else 0


def _named(
    name: Name, repeated: bytes | None, own: str, split: Split, stitches: CallMemory
) -> _Episode:
    """Return the episode that a call names."""
    key = same_tenant(own, name.key)
    attempt = None if repeated is None else stitches.retried(repeated, key, split, tenant_of(key))
    return _Episode(key, name.method, retry_of=attempt.call_id if attempt else None)


def _unnamed(
    headers: Mapping[str, str],
    fingerprints: Sequence[bytes],
    repeated: bytes | None,
    own: str,
    split: Split,
    stitches: CallMemory,
) -> _Episode:
    """Return the episode of a call that names none, from what the call repeats."""
    tenant = tenant_of(own)
    needs = own_digests(tenant, fingerprints)
    joined = stitches.find(needs)
    follows = joined.follows if isinstance(joined, Joined) else stitches.followed(needs)
    attempt = None if repeated is None else stitches.retried(repeated, None, split, tenant)
    if attempt is not None:
        return _Episode(attempt.episode, "retry", "likely", (), follows, attempt.call_id)
    if isinstance(joined, Joined):
        return _Episode(joined.episode, joined.method, joined.confidence, (), follows)
    if isinstance(joined, Doubt):
        return _Episode(own, OWN_EPISODE, "doubtful", needs)
    if needs:
        return _Episode(own, OWN_EPISODE, "likely", needs, follows)
    parent = headers.get("traceparent")
    trace = None if parent is None else trace_id(parent)
    if trace is not None:
        return _Episode(same_tenant(own, f"trace:{trace}"), "trace", "likely")
    return _Episode(own, OWN_EPISODE)


def _role(
    headers: Mapping[str, str],
    role: str,
    from_url: str | None,
    hints: SessionHints,
    others: Iterable[Name],
    warnings: list[str],
) -> str | None:
    """Return the agent or the task, from our header or URL first, then from tools' names."""
    ours = _ours(headers, role, from_url)
    if not (ours or others or hints.metadata or hints.baggage):
        return None
    name = _first_usable(chain(ours, hints.own(role), others), warnings)
    return None if name is None else name.key


def _ours(headers: Mapping[str, str], role: str, from_url: str | None) -> Sequence[Name]:
    """Return the names from our header and our URL, in this order."""
    header = _HEADERS[role]
    value = headers.get(header)
    if value is None and from_url is None:
        return ()
    names = [] if value is None else [Name(value, "header", header)]
    if from_url is not None:
        names.append(Name(from_url, "url", f"/{role}/ in the URL"))
    return names


def _first_usable(names: Iterable[Name], warnings: list[str]) -> Name | None:
    """Return the first usable name, and append a warning for each unusable one before it."""
    for name in names:
        wrong = what_is_wrong(name.value)
        if wrong is None:
            return name
        warnings.append(f"{name.where} {wrong}; ignored")
    return None
