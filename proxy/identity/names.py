"""Read W3C trace context and baggage, where a call names the work it belongs to (pure).

https://www.w3.org/TR/baggage/ and https://www.w3.org/TR/trace-context/. A malformed header is
treated as absent: the specifications ask receivers not to fail because of one.


Read names of sessions, agents, tasks and splits that are sent with a call (pure).

A name of ours (`pawl_episode`, `pawl.episode`) is an episode's key as it is. A foreign name gets a
namespace before it (`claude-code:UUID`), so that equal ids of two tools are two episodes. The
namespace is the tool's, or the kind of id where many tools use the name. Which tool sends what, and
the source for it, stands in docs/decisions/012-identity.md. A call's split, training or evaluation,
may follow from the name of its task.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from store.records import EVAL, SPLITS, TRAIN, Split

# Platforms must pass on baggage of up to this many bytes (W3C Baggage §3.3.2).
MAX_BAGGAGE: Final = 8192
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?",
    re.ASCII,
)


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


def trace_id(traceparent: str) -> str | None:
    """Return the trace id of a `traceparent` header, or None if the header is malformed."""
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    return match["trace"] if match else None


Table = tuple[tuple[str, str], ...]

MAX_LENGTH: Final = 256
SUB_AGENT: Final = "subagent"

# Header and namespace; the first one present counts. A parent's session comes before the
# session's own, because a sub-agent works in the episode of the agent that sent it.
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
METADATA: Final = (
    ("pawl_episode", ""),
    ("litellm_session_id", "litellm"),
    ("session_id", "session"),
    ("conversation_id", "conversation"),
    ("thread_id", "thread"),
)
FIELDS: Final = (
    ("litellm_session_id", "litellm"),
    ("litellm_trace_id", "litellm"),
    ("session_id", "session"),
)
BAGGAGE: Final = (
    ("pawl.episode", ""),
    ("session.id", "session"),
    ("langfuse_session_id", "langfuse"),
    ("gen_ai.conversation.id", "conversation"),
)
# One per sub-agent. Its presence tells the role; its value is only an id.
_SUB_AGENT_HEADERS: Final = ("x-claude-code-agent-id", "x-parent-session-id")
_AGENT_HEADERS: Final = (("x-openai-subagent", ""), ("x-litellm-agent-id", ""))
_AGENT_METADATA: Final = (("agent_name", ""),)
_AGENT_BAGGAGE: Final = (("gen_ai.agent.name", ""),)
_IN_USER_ID: Final = (("session_id", "claude-code"),)
_IN_CONVERSATION: Final = (("id", "conversation"),)
_OLD_USER_ID: Final = re.compile(r"user_.*_session_(?P<session>[0-9A-Fa-f-]{36})", re.DOTALL)


# Most calls have none of these headers: one set test instead of a look-up for each.
_EPISODE_HEADERS: Final = frozenset(name for name, _ in SESSION_HEADERS)
_EPISODE_FIELDS: Final = frozenset(("conversation", *(name for name, _ in FIELDS)))
_ROLE_HEADERS: Final = frozenset((*_SUB_AGENT_HEADERS, *(name for name, _ in _AGENT_HEADERS)))
# Unless PAWL_EVAL_TASKS says otherwise, a task of this beginning is evaluation.
EVAL_TASKS: Final = "eval/"
# How much of an unknown split a warning says back.
SAID_BACK: Final = 40
_KNOWN: Final[Mapping[str, Split]] = {TRAIN: TRAIN, EVAL: EVAL}


class Name(msgspec.Struct, frozen=True):
    """Give a name that a call goes by, its method and, for warnings, its place in the request."""

    value: str
    method: str
    where: str
    namespace: str = ""

    @property
    def key(self) -> str:
        """Return the name with its namespace, as an episode's key."""
        return f"{self.namespace}:{self.value}" if self.namespace else self.value


class SessionHints(msgspec.Struct, frozen=True):
    """Look for names in a request's headers, metadata and baggage, beside our headers and URL."""

    headers: Mapping[str, str]
    metadata: dict[str, Any]
    baggage: dict[str, str]

    def own(self, name: str) -> Iterable[Name]:
        """Return the names of the `agent`, `task` or `split` that are given under a key of ours."""
        return self._own(name) if self.metadata or self.baggage else ()

    def _own(self, name: str) -> Iterator[Name]:
        if self.metadata:
            yield from _told(self.metadata, ((f"pawl_{name}", ""),), "metadata", "metadata.")
        if self.baggage:
            yield from _told(self.baggage, ((f"pawl.{name}", ""),), "baggage", "baggage ")

    def agents(self) -> Iterable[Name]:
        """Return the agent names that tools send under their own keys."""
        silent = not self.metadata and not self.baggage
        return () if silent and _ROLE_HEADERS.isdisjoint(self.headers) else self._agents()

    def _agents(self) -> Iterator[Name]:
        if not _ROLE_HEADERS.isdisjoint(self.headers):
            yield from _told(self.headers, _AGENT_HEADERS, "session", "")
            for header in _SUB_AGENT_HEADERS:
                if header in self.headers:
                    yield Name(SUB_AGENT, "session", header)
        if self.metadata:
            yield from _told(self.metadata, _AGENT_METADATA, "metadata", "metadata.")
        if self.baggage:
            yield from _told(self.baggage, _AGENT_BAGGAGE, "baggage", "baggage ")


def read_hints(headers: Mapping[str, str], fields: dict[str, Any]) -> SessionHints:
    """Return a request's sources of names; a value of an unexpected shape is left out."""
    metadata, baggage = fields.get("metadata"), headers.get("baggage")
    return SessionHints(
        headers=headers,
        metadata=metadata if isinstance(metadata, dict) else {},
        baggage=parse_baggage(baggage) if baggage else {},
    )


def episode_names(hints: SessionHints, fields: dict[str, Any]) -> Iterable[Name]:
    """Return candidate episode names, highest priority first."""
    silent = not hints.metadata and not hints.baggage and _EPISODE_FIELDS.isdisjoint(fields)
    if silent and _EPISODE_HEADERS.isdisjoint(hints.headers):
        return ()
    return _episode_names(hints, fields)


def _episode_names(hints: SessionHints, fields: dict[str, Any]) -> Iterator[Name]:
    if not _EPISODE_HEADERS.isdisjoint(hints.headers):
        yield from _told(hints.headers, SESSION_HEADERS, "session", "")
    if hints.metadata:
        yield from _claude_code_session(hints.metadata.get("user_id"))
        yield from _told(hints.metadata, METADATA, "metadata", "metadata.")
    yield from _told(fields, FIELDS, "metadata", "")
    if "conversation" in fields:
        yield from _conversation(fields["conversation"])
    if hints.baggage:
        yield from _told(hints.baggage, BAGGAGE, "baggage", "baggage ")


def what_is_wrong(value: str) -> str | None:
    """Return why a value is unusable as a name, or None if it is usable."""
    if not value.strip():
        return "is empty"
    if len(value) > MAX_LENGTH:
        return f"is longer than {MAX_LENGTH} characters"
    if not value.isprintable():
        return "holds unprintable characters"
    return None


def _told(source: Mapping[str, Any], table: Table, method: str, prefix: str) -> Iterator[Name]:
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
        yield from _told(parsed, _IN_USER_ID, "session", "metadata.user_id.")


def _conversation(conversation: Any) -> Iterator[Name]:
    """Yield the name in the Responses API's `conversation`: an id, or an object with one."""
    source = conversation if isinstance(conversation, dict) else {"id": conversation}
    yield from _told(source, _IN_CONVERSATION, "response", "conversation ")


def split_of(
    names: Iterable[Name], task: str | None, eval_tasks: str, warnings: list[str]
) -> Split:
    """Return the first known split that is named, else the one that the task's name tells.

    Args:
        names: what the call says, the first to count first.
        task: the call's task, if it names one.
        eval_tasks: how the names of tasks begin whose episodes are evaluation.
        warnings: gets a warning for each unknown split before the one that counts.
    """
    for name in names:
        split = _KNOWN.get(name.value.strip().lower())
        if split is not None:
            return split
        shown, known = ascii(name.value[:SAID_BACK]), " and ".join(SPLITS)
        warnings.append(f"{name.where} {shown} is no split ({known} are); ignored")
    return EVAL if task is not None and task.startswith(eval_tasks) else TRAIN
