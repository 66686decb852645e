"""Recognise calls that clients make beside their agent's work, such as titles and summaries (pure).

Codex states the kind in each request. Other clients do not, but send prompts that agents' work
never has, recognised by their beginnings in the clients' packages (Claude Code 2.1.332, OpenCode
1.18.33, Qwen Code 0.24.4, pi 1.5.2). A call that merely has no tools, or a short limit, is not
taken for a side call: an agent's own work may look the same. Unrecognised side calls are trained.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec

from proxy.formats.conversation import Turns, texts_of
from proxy.formats.raw_json import UNREADABLE, Object
from proxy.identity.identify import codex_turn

CODEX_KINDS: Final = frozenset({"compaction", "memory", "prewarm"})


class Prompt(NamedTuple):
    """The kind of a side call, and how its prompt begins, in characters that JSON never escapes.

    The prompt is the system prompt of a call without tools or, with `is_users`, the last user
    message of a conversation that may have tools.
    """

    kind: str
    beginning: str
    is_users: bool = False


PROMPTS: Final = (
    # Claude Code
    Prompt("title", "You are naming a coding session so the user can pick it out of a long list"),
    Prompt("compaction", "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.", True),
    Prompt("suggestion", "[SUGGESTION MODE: Suggest what the user might naturally type next", True),
    # OpenCode
    Prompt("title", "You are a title generator. You output ONLY a thread title. Nothing else."),
    Prompt("compaction", "You are a context summarization agent. You are given a conversation"),
    Prompt("summary", "Summarize what was done in this conversation. Write like a pull request"),
    # Qwen Code sends it at the end of the thread and, if that fails, in a separate thread.
    Prompt("compaction", "You are the component that summarizes a conversation when its", True),
    Prompt("compaction", "You are the component that summarizes a conversation when its"),
    # pi
    Prompt("compaction", "You are a context summarization assistant. Your task is to read a conv"),
)
_CANDIDATES: Final = tuple((prompt, prompt.beginning.encode()) for prompt in PROMPTS)


def side_kind(body: bytes, fields: dict[str, Any], raw: Object | None, turns: Turns) -> str | None:
    """Return the kind of a side call, or None for a call of an agent's work.

    Args:
        body: the request as the client sent it.
        fields: the request's fields without the large ones, parsed.
        raw: all of its fields, unparsed; None if the request is not a JSON object.
        turns: the reader of its conversation.
    """
    kind = codex_turn(fields).get("request_kind")
    if isinstance(kind, str) and kind in CODEX_KINDS:
        return kind
    for prompt, beginning in _CANDIDATES:
        # Nearly all requests contain no known beginning, so their conversation is not read.
        if beginning in body and raw is not None and _has_prompt(prompt, fields, raw, turns):
            return prompt.kind
    return None


def _has_prompt(prompt: Prompt, fields: dict[str, Any], raw: Object, turns: Turns) -> bool:
    """Return whether a request has a known prompt in the expected place."""
    if not prompt.is_users and fields.get("tools"):
        return False
    try:
        read = turns.user_contents if prompt.is_users else turns.system_contents
        contents = list(read(raw))
        # There may be several system texts; of the users' messages only the last may match.
        candidates = contents[-1:] if prompt.is_users else contents
        return any(text.lstrip().startswith(prompt.beginning) for text in _texts(candidates))
    except UNREADABLE:
        return False


def _texts(contents: Iterable[msgspec.Raw]) -> Iterable[str]:
    return (text for content in contents for text in texts_of(msgspec.json.decode(content)))
