"""Compute fingerprints that join calls without a name: 16 bytes, the first is the kind (pure).

A call provides fingerprints of what a later call may repeat of it, and needs those of what it
repeats itself. They go to the ledger with the record. The ledger knows what the calls of all
proxies provide, and joins what a single proxy must not join alone: other conversations may begin
with the same words.
"""

from hashlib import blake2b
from typing import Any, Final

from proxy.formats.base import ReplySummary, Turns
from proxy.formats.conversation import SIZE, Conversation, is_unique

TOOL_CALL: Final = 1
RESPONSE: Final = 2
# A conversation's beginning, up to and including a reply. The first kind consists of words only,
# and any number of conversations may begin with them; the second contains a unique tool call id.
PREFIX: Final = 3
UNIQUE_PREFIX: Final = 4
PREFIXES: Final = (PREFIX, UNIQUE_PREFIX)
METHODS: Final = {TOOL_CALL: "tool_call", RESPONSE: "response", UNIQUE_PREFIX: "prefix"}

# How many replies before the newest are needed, too: the client may have inserted one of its own.
EARLIER_REPLIES: Final = 3
MAX_TOOL_IDS: Final = 8


def needed_fingerprints(
    turns: Turns, fields: dict[str, Any], conversation: Conversation | None = None
) -> tuple[bytes, ...]:
    """Return the fingerprints that a request needs, surest first.

    They are: the tool calls it brings results for; the response it continues; its prefix up to the
    newest reply that something follows; the prefixes up to the replies before it; and a reply at
    its very end (one to be continued, or words put into the assistant's mouth). `conversation` is
    the request's, if it was read already.
    """
    history = conversation or turns.read(fields)
    needs = [_fingerprint(TOOL_CALL, name) for name in history.results[::-1] if is_unique(name)]
    del needs[MAX_TOOL_IDS:]
    previous = turns.continues(fields)
    if previous is not None:
        needs.append(_fingerprint(RESPONSE, previous))
    needs += [_prefix(reply) for reply in history.replies[: -2 - EARLIER_REPLIES : -1]]
    open_reply = history.open_reply()
    if open_reply is not None:
        needs.append(_prefix(open_reply))
    return tuple(dict.fromkeys(needs))


def provided_fingerprints(
    turns: Turns,
    fields: dict[str, Any],
    summary: ReplySummary,
    conversation: Conversation | None = None,
) -> tuple[bytes, ...]:
    """Return the fingerprints that a call provides: its tool calls, its id, the whole conversation.

    `conversation` is the request's, if it was read already. The reply is added to it.
    """
    provides = [
        _fingerprint(TOOL_CALL, call.id) for call in summary.tool_calls if is_unique(call.id)
    ]
    if turns.continued_by_id and summary.response_id:
        provides.append(_fingerprint(RESPONSE, summary.response_id))
    if (summary.text or summary.tool_calls) and turns.shows_all(fields):
        history = conversation or turns.read(fields)
        history.said(summary.text)
        for call in summary.tool_calls:
            history.called(call.id, call.name, call.arguments)
        reply = history.open_reply()
        if reply is not None:
            provides.append(_prefix(reply))
    return tuple(dict.fromkeys(provides))


def _fingerprint(kind: int, name: str) -> bytes:
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=SIZE).digest()
    return bytes((kind,)) + digest[1:]


def _prefix(reply: tuple[bytes, bool]) -> bytes:
    digest, unique = reply
    return bytes((UNIQUE_PREFIX if unique else PREFIX,)) + digest[1:]
