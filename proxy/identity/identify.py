"""Identify the episode, agent, task and split of a call (pure).

Each of the four comes from the first source that names it: our headers, our URL, then the names
that tools and frameworks give their sessions, in headers, metadata, W3C baggage or trace context. A
foreign name gets a namespace before it (`claude-code:UUID`), so that equal ids of two tools are two
episodes; docs/reference/http.md lists what each tool sends. A call without an episode's
name joins the attempt it repeats, or the episode whose reply it repeats
(`proxy.identity.call_memory`), or the trace it is part of; otherwise it is an episode of its own.
An unusable value never fails the call: it is ignored with a warning. `user` is never read: it names
a person, not a run.

Calls are joined here only by fingerprints that can have a single source. All other calls are stored
as episodes of their own, with the fingerprints they need (`CallIdentity.needs`): only the database
knows the fingerprints of all proxies, and whether a source is the only one.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final
from urllib.parse import unquote
from uuid import UUID

import msgspec

from proxy.formats.base import ModelRequest
from proxy.formats.conversation import Conversation
from proxy.formats.raw_json import UNREADABLE
from proxy.identity.call_memory import Ambiguous, CallMemory, JoinedEpisode, needed_fingerprints
from proxy.routing import Route
from store.records import EVAL, EVAL_TASKS, OWN_EPISODE, SPLITS, TRAIN, Confidence, Split
from store.tenants import bare, keyed_digests, name_in_same_tenant, tenant_of

# Platforms must pass on baggage of up to this many bytes (W3C Baggage §3.3.2).
MAX_BAGGAGE: Final = 8192
_TRACEPARENT: Final = re.compile(
    r"(?P<context>(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})"
    r"(?:-.*)?\Z",
    re.ASCII,
)
# The place of the trace id in a `traceparent`.
_TRACE: Final = slice(3, 35)


def parse_baggage(header: str) -> dict[str, str]:
    """Return the members of a `baggage` header, values percent-decoded, properties left out.

    If a key occurs twice, its first value counts. A header longer than `MAX_BAGGAGE` gives no
    members.
    """
    members: dict[str, str] = {}
    if len(header) > MAX_BAGGAGE:
        return members
    for member in header.split(","):
        key, equals, value = member.partition(";")[0].partition("=")
        if equals and key.strip():
            members.setdefault(key.strip(), unquote(value.strip()))
    return members


def trace_context(headers: Mapping[str, str]) -> str | None:
    """Return the client's trace context in the form of `traceparent` version 00, or None.

    `VERSION-TRACE-SPAN-FLAGS`, all in hexadecimal. A malformed header counts as absent.
    """
    match = _TRACEPARENT.match(headers.get("traceparent", "").strip())
    return match["context"] if match else None


Table = tuple[tuple[str, str], ...]

MAX_LENGTH: Final = 256
SUB_AGENT: Final = "subagent"

# Header and namespace; the first one present counts. A parent's session comes before the
# session's own, because a sub-agent works in the episode of the agent that started it.
SESSION_HEADERS: Final = (
    ("x-claude-code-session-id", "claude-code"),
    ("x-litellm-trace-id", "litellm"),
    ("x-litellm-session-id", "litellm"),
    ("helicone-session-id", "helicone"),
    ("x-opencode-session", "opencode"),
    ("x-parent-session-id", "session"),
    ("x-session-id", "session"),
    ("x-session-affinity", "session"),
    ("session-id", "codex"),
    ("session_id", "codex"),
)
METADATA_KEYS: Final = (
    ("pawl_episode", ""),
    ("litellm_session_id", "litellm"),
    ("session_id", "session"),
    ("conversation_id", "conversation"),
    ("thread_id", "thread"),
)
BODY_FIELDS: Final = (
    ("litellm_session_id", "litellm"),
    ("litellm_trace_id", "litellm"),
    ("session_id", "session"),
)
BAGGAGE_KEYS: Final = (
    ("pawl.episode", ""),
    ("session.id", "session"),
    ("langfuse_session_id", "langfuse"),
    ("gen_ai.conversation.id", "conversation"),
)
# Headers that only sub-agents send: their presence gives the agent's name; the value is an id.
_SUB_AGENT_HEADERS: Final = ("x-claude-code-agent-id", "x-parent-session-id")
_AGENT_HEADERS: Final = (("x-openai-subagent", ""), ("x-litellm-agent-id", ""))
_AGENT_METADATA: Final = (("agent_name", ""),)
_AGENT_BAGGAGE: Final = (("gen_ai.agent.name", ""),)
# Headers that name the thread of a sub-agent: its own session's, even if the parent's is named.
_LANE_HEADERS: Final = (
    ("x-claude-code-agent-id", ""),
    ("x-session-id", ""),
    ("x-session-affinity", ""),
)
# Codex (0.171.0) describes each request in a JSON text of its `client_metadata`.
CODEX_TURN: Final = "x-codex-turn-metadata"
_CODEX_MAIN_AGENT: Final = "/root"
_IN_USER_ID: Final = (("session_id", "claude-code"),)
_IN_CONVERSATION: Final = (("id", "conversation"),)
_OLD_USER_ID: Final = re.compile(r"user_.*_session_(?P<session>[0-9A-Fa-f-]{36})", re.DOTALL)


# Most calls have none of these headers: one set test instead of a look-up for each.
_EPISODE_HEADERS: Final = frozenset(name for name, _ in SESSION_HEADERS)
_EPISODE_FIELDS: Final = frozenset(("conversation", *(name for name, _ in BODY_FIELDS)))
_ROLE_HEADERS: Final = frozenset((*_SUB_AGENT_HEADERS, *(name for name, _ in _AGENT_HEADERS)))
# Characters of an unknown split that a warning shows.
MOST_SHOWN: Final = 40
_KNOWN_SPLITS: Final[Mapping[str, Split]] = {TRAIN: TRAIN, EVAL: EVAL}


class Name(msgspec.Struct, frozen=True):
    """A name in a request, the method of giving it, and where it is, for warnings."""

    value: str
    method: str
    where: str
    namespace: str = ""

    @property
    def key(self) -> str:
        """Return the name with its namespace in front, if it has one: `claude-code:UUID`."""
        return f"{self.namespace}:{self.value}" if self.namespace else self.value


class SessionHints(msgspec.Struct, frozen=True):
    """Where a request may name episode, agent, task and split, besides Pawl's headers and URL."""

    headers: Mapping[str, str]
    metadata: dict[str, Any]
    baggage: dict[str, str]

    def own_names(self, role: str) -> Iterable[Name]:
        """Return the names under Pawl's keys in metadata and baggage: `pawl_ROLE`, `pawl.ROLE`."""
        return self._names_from_pawl_keys(role) if self.metadata or self.baggage else ()

    def _names_from_pawl_keys(self, role: str) -> Iterator[Name]:
        if self.metadata:
            yield from _names_in(self.metadata, ((f"pawl_{role}", ""),), "metadata", "metadata.")
        if self.baggage:
            yield from _names_in(self.baggage, ((f"pawl.{role}", ""),), "baggage", "baggage ")

    def agent_names(self) -> Iterable[Name]:
        """Return the agent names that clients and frameworks send under other keys than Pawl's."""
        silent = not self.metadata and not self.baggage
        return () if silent and _ROLE_HEADERS.isdisjoint(self.headers) else self._agent_names()

    def _agent_names(self) -> Iterator[Name]:
        if not _ROLE_HEADERS.isdisjoint(self.headers):
            yield from _names_in(self.headers, _AGENT_HEADERS, "session", "")
            for header in _SUB_AGENT_HEADERS:
                if header in self.headers:
                    yield Name(SUB_AGENT, "session", header)
        if self.metadata:
            yield from _names_in(self.metadata, _AGENT_METADATA, "metadata", "metadata.")
        if self.baggage:
            yield from _names_in(self.baggage, _AGENT_BAGGAGE, "baggage", "baggage ")


def read_hints(headers: Mapping[str, str], fields: dict[str, Any]) -> SessionHints:
    """Return a request's headers, metadata and baggage; an unexpected shape counts as empty."""
    metadata, baggage = fields.get("metadata"), headers.get("baggage")
    return SessionHints(
        headers=headers,
        metadata=metadata if isinstance(metadata, dict) else {},
        baggage=parse_baggage(baggage) if baggage else {},
    )


def episode_names(hints: SessionHints, fields: dict[str, Any]) -> Iterable[Name]:
    """Return a request's episode names by priority, without those of Pawl's header and URL."""
    silent = not hints.metadata and not hints.baggage and _EPISODE_FIELDS.isdisjoint(fields)
    if silent and _EPISODE_HEADERS.isdisjoint(hints.headers):
        return ()
    return _episode_names(hints, fields)


def _episode_names(hints: SessionHints, fields: dict[str, Any]) -> Iterator[Name]:
    if not _EPISODE_HEADERS.isdisjoint(hints.headers):
        yield from _names_in(hints.headers, SESSION_HEADERS, "session", "")
    if hints.metadata:
        yield from _claude_code_session(hints.metadata.get("user_id"))
        yield from _names_in(hints.metadata, METADATA_KEYS, "metadata", "metadata.")
    yield from _names_in(fields, BODY_FIELDS, "metadata", "")
    if "conversation" in fields:
        yield from _conversation_name(fields["conversation"])
    if hints.baggage:
        yield from _names_in(hints.baggage, BAGGAGE_KEYS, "baggage", "baggage ")


def why_unusable(value: str) -> str | None:
    """Return why a value is unusable as a name, or None if it is usable."""
    if not value.strip():
        return "is empty"
    if len(value) > MAX_LENGTH:
        return f"is longer than {MAX_LENGTH} characters"
    if not value.isprintable():
        return "holds unprintable characters"
    return None


def _names_in(source: Mapping[str, Any], table: Table, method: str, prefix: str) -> Iterator[Name]:
    for name, namespace in table:
        value = source.get(name)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str):
            yield Name(value, method, prefix + name, namespace)


def _claude_code_session(user_id: Any) -> Iterator[Name]:
    """Yield Claude Code's session within `metadata.user_id`; the rest of it names a person.

    It has two forms: `user_…_session_UUID`, and since 2.1.86 an object as JSON text.
    """
    if not isinstance(user_id, str):
        return
    if match := _OLD_USER_ID.fullmatch(user_id):
        yield Name(match["session"], "session", "metadata.user_id", "claude-code")
    elif user_id.startswith("{"):
        try:
            parsed = msgspec.json.decode(user_id, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return
        yield from _names_in(parsed, _IN_USER_ID, "session", "metadata.user_id.")


def _conversation_name(conversation: Any) -> Iterator[Name]:
    """Yield the name in the Responses API's `conversation`: an id, or an object with one."""
    source = conversation if isinstance(conversation, dict) else {"id": conversation}
    yield from _names_in(source, _IN_CONVERSATION, "response", "conversation ")


HEADER_PREFIX: Final = "x-pawl-"
_HEADERS: Final = {role: HEADER_PREFIX + role for role in ("episode", "agent", "task", "split")}
RETRY_COUNT: Final = "x-stainless-retry-count"
DEFAULT_AGENT: Final = "default"
_LONGEST_COUNT: Final = 3


class CallIdentity(msgspec.Struct, frozen=True):
    """A call's episode, agent, task and split, and the method and confidence of the episode.

    `lane` is the sub-agent's thread within the episode; None: the main agent's. `needs` are the
    fingerprints by which the database may join the call to an episode. `follows` is the episode
    whose policy version the call keeps: its own, or the episode that it continues as far as this
    proxy knows (a wrong guess costs nothing, for any live version may answer). `conversation` is
    the request's, if it was read, for `provided_fingerprints`. `trace` is the client's trace
    context. Episodes and task are stored names (`store.tenants`); `name` is the episode's name as
    its client knows it.
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
    trace: str | None = None
    lane: str | None = None


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
    memory: CallMemory,
    conversation: Conversation | None = None,
    eval_tasks: str = EVAL_TASKS,
) -> CallIdentity:
    """Return the identity of a call: its episode, agent, task and split.

    `headers` are by lower-case name. The raw body is used only if the request is a retry. `own` is
    the stored name of the episode that the call gets if it belongs to no other; its tenant is that
    of all names in the call. `conversation` is the request's, if it was read already.
    """
    warnings: list[str] = []
    hints = read_hints(headers, request.fields)
    retry = retry_count(headers)
    task = _agent_or_task(headers, "task", route.task, hints, (), warnings)
    split = _split(headers, route, hints.own_names("split"), task, eval_tasks, warnings)
    names = chain(
        _our_names(headers, "episode", route.episode), episode_names(hints, request.fields)
    )
    name = _first_usable(names, warnings)
    if name is not None:
        episode = _named_episode(name, request.body if retry else None, own, split, memory)
    else:
        assert route.wire_format is not None
        turns = route.wire_format.turns
        conversation = conversation or turns.read(request.fields)
        needs = needed_fingerprints(turns, request.fields, conversation)
        episode = _unnamed_episode(
            headers, needs, request.body if retry else None, own, split, memory
        )
    agent = _agent_or_task(headers, "agent", route.agent, hints, hints.agent_names(), warnings)
    return CallIdentity(
        episode=episode.key,
        name=bare(episode.key),
        method=episode.method,
        agent=agent or DEFAULT_AGENT,
        task=None if task is None else name_in_same_tenant(own, task),
        split=split,
        follows=episode.follows or episode.key,
        warnings=tuple(warnings),
        confidence=episode.confidence,
        needs=episode.needs,
        retry=retry,
        retry_of=episode.retry_of,
        conversation=conversation,
        trace=trace_context(headers),
        lane=_lane(headers, request.fields, warnings),
    )


def identity_without_body(
    own: str,
    name: str,
    route: Route,
    headers: Mapping[str, str] | None = None,
    eval_tasks: str = EVAL_TASKS,
) -> CallIdentity:
    """Return the identity of a call whose body was not read: an episode of its own.

    `own` is the episode's stored name, and `name` its name as the client knows it. `headers`, by
    lower-case name, are given if the split and the trace context are to be read from them.
    """
    task = None if route.task is None else name_in_same_tenant(own, route.task)
    split = TRAIN if headers is None else split_without_body(headers, route, eval_tasks)
    trace = None if headers is None else trace_context(headers)
    return CallIdentity(own, name, OWN_EPISODE, DEFAULT_AGENT, task, split=split, trace=trace)


def split_without_body(headers: Mapping[str, str], route: Route, eval_tasks: str) -> Split:
    """Return the split of a call whose body cannot be read, by its headers and URL."""
    return _split(headers, route, (), headers.get(_HEADERS["task"], route.task), eval_tasks, [])


def _split(
    headers: Mapping[str, str],
    route: Route,
    others: Iterable[Name],
    task: str | None,
    eval_tasks: str,
    warnings: list[str],
) -> Split:
    """Return the first known split that the call names, else the one by its task and `eval_tasks`.

    Pawl's header and URL come first, then `others`. Each unknown split before the first known one
    adds a warning.
    """
    for name in chain(_our_names(headers, "split", route.split), others):
        split = _KNOWN_SPLITS.get(name.value.strip().lower())
        if split is not None:
            return split
        shown, known = ascii(name.value[:MOST_SHOWN]), " and ".join(SPLITS)
        warnings.append(f"{name.where} {shown} is no split ({known} are); ignored")
    return EVAL if task is not None and task.startswith(eval_tasks) else TRAIN


def retry_count(headers: Mapping[str, str]) -> int:
    """Return how often the SDK says it sent this request before; 0 without a valid header."""
    value = headers.get(RETRY_COUNT)
    if value is None:
        return 0
    return int(value) if value.isdecimal() and len(value) <= _LONGEST_COUNT else 0


def _named_episode(
    name: Name, retried_body: bytes | None, own: str, split: Split, memory: CallMemory
) -> _Episode:
    """Return the episode that a call names, and the failed attempt that it repeats, if any."""
    key = name_in_same_tenant(own, name.key)
    attempt = (
        None
        if retried_body is None
        else memory.take_attempt(retried_body, key, split, tenant_of(key))
    )
    return _Episode(key, name.method, retry_of=attempt.call_id if attempt else None)


def _unnamed_episode(
    headers: Mapping[str, str],
    fingerprints: Sequence[bytes],
    retried_body: bytes | None,
    own: str,
    split: Split,
    memory: CallMemory,
) -> _Episode:
    """Return the episode of a call that names none.

    In this order: the episode of the failed attempt that the call repeats, the episode whose
    content it repeats, its trace's episode, or `own`.
    """
    tenant = tenant_of(own)
    needs = keyed_digests(tenant, fingerprints)
    joined = memory.find_episode(needs)
    follows = joined.follows if isinstance(joined, JoinedEpisode) else memory.likely_episode(needs)
    attempt = (
        None if retried_body is None else memory.take_attempt(retried_body, None, split, tenant)
    )
    if attempt is not None:
        return _Episode(attempt.episode, "retry", "likely", (), follows, attempt.call_id)
    if isinstance(joined, JoinedEpisode):
        return _Episode(joined.episode, joined.method, joined.confidence, (), follows)
    if isinstance(joined, Ambiguous):
        return _Episode(own, OWN_EPISODE, "doubtful", needs)
    context = trace_context(headers)
    if context is not None:
        trace = name_in_same_tenant(own, f"trace:{context[_TRACE]}")
        if not needs:
            memory.begin_trace(trace)
        # A trace that began at another proxy is left to the database, which joins by certain needs.
        if memory.has_begun(trace) and follows in (None, trace):
            return _Episode(trace, "trace", "likely")
    if needs:
        return _Episode(own, OWN_EPISODE, "likely", needs, follows)
    return _Episode(own, OWN_EPISODE)


def _agent_or_task(
    headers: Mapping[str, str],
    role: str,
    from_url: str | None,
    hints: SessionHints,
    others: Iterable[Name],
    warnings: list[str],
) -> str | None:
    """Return the name of the `role` (agent or task): from our header, URL or keys, or `others`."""
    ours = _our_names(headers, role, from_url)
    if not (ours or others or hints.metadata or hints.baggage):
        return None
    name = _first_usable(chain(ours, hints.own_names(role), others), warnings)
    return None if name is None else name.key


def _lane(headers: Mapping[str, str], fields: dict[str, Any], warnings: list[str]) -> str | None:
    """Return the thread of a sub-agent, as its client names it; None for the main agent."""
    names: Iterable[Name] = ()
    if any(name in headers for name in _SUB_AGENT_HEADERS):
        names = _names_in(headers, _LANE_HEADERS, "session", "")
    elif "client_metadata" in fields:
        agent = codex_turn(fields).get("agent_name")
        if isinstance(agent, str) and agent != _CODEX_MAIN_AGENT:
            names = (Name(agent, "metadata", "client_metadata agent_name"),)
    name = _first_usable(names, warnings)
    return None if name is None else name.value


def codex_turn(fields: dict[str, Any]) -> dict[str, Any]:
    """Return Codex's description of a request, in `client_metadata`; empty for other clients."""
    metadata = fields.get("client_metadata")
    text = metadata.get(CODEX_TURN) if isinstance(metadata, dict) else None
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if isinstance(text, str) else {}
    except UNREADABLE:
        return {}


def _our_names(headers: Mapping[str, str], role: str, from_url: str | None) -> Sequence[Name]:
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
        wrong = why_unusable(name.value)
        if wrong is None:
            return name
        warnings.append(f"{name.where} {wrong}; ignored")
    return None
