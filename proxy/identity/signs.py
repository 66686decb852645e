"""Signs by which calls without a name are joined: 16-byte digests, the first byte the kind.

A call offers what a later one may repeat of it, and asks for what it repeats itself. The
digests go to the ledger with the record, which knows the offers of all proxies and joins by
them what one proxy could not, or must not alone: a prefix of mere words may be others', too.
"""

from hashlib import blake2b
from typing import Any, Final

from proxy.dialects.base import Gist
from proxy.identity.conversation import SIZE, Conversation, is_unique, read_conversation

TOOL_CALL: Final = 1
RESPONSE: Final = 2
# A conversation's beginning, up to and including a reply: of words that any number of
# conversations may begin with, or with a tool call's unique id among them.
PREFIX: Final = 3
UNIQUE_PREFIX: Final = 4
PREFIXES: Final = (PREFIX, UNIQUE_PREFIX)
METHODS: Final = {TOOL_CALL: "tool_call", RESPONSE: "response", UNIQUE_PREFIX: "prefix"}

# How many replies before the newest are asked for: a client may have put in one of its own.
EARLIER_REPLIES: Final = 3
MAX_TOOL_IDS: Final = 8
# The states that a server keeps for its client: a request then shows only what is new.
_KEPT_BY_SERVER: Final = ("previous_response_id", "conversation")


def asks_of(
    dialect: str, fields: dict[str, Any], conversation: Conversation | None = None
) -> tuple[bytes, ...]:
    """What a request repeats of earlier calls, the surest first.

    The tool calls it brings results for, the response it goes on from, then its prefix up
    to the newest reply that something follows, those before it, and a reply at its very
    end (one that is to be continued, or words put into the assistant's mouth).
    `conversation` is the request's, if it was read already.
    """
    said = conversation or read_conversation(fields)
    asks = [_sign(TOOL_CALL, name) for name in reversed(said.results) if is_unique(name)]
    del asks[MAX_TOOL_IDS:]
    previous = fields.get("previous_response_id")
    if dialect == "responses" and isinstance(previous, str) and previous:
        asks.append(_sign(RESPONSE, previous))
    asks += [_prefix(reply) for reply in said.replies[: -2 - EARLIER_REPLIES : -1]]
    open_reply = said.open_reply()
    if open_reply is not None:
        asks.append(_prefix(open_reply))
    return tuple(dict.fromkeys(asks))


def offers_of(
    dialect: str, fields: dict[str, Any], gist: Gist, conversation: Conversation | None = None
) -> tuple[bytes, ...]:
    """What a later call may repeat of this one: its tool calls, its id, all that was said.

    `conversation` is the request's, if it was read already; it takes the reply in.
    """
    offers = [_sign(TOOL_CALL, call.id) for call in gist.tool_calls if is_unique(call.id)]
    if dialect == "responses" and gist.response_id:
        offers.append(_sign(RESPONSE, gist.response_id))
    if (gist.text or gist.tool_calls) and not any(fields.get(name) for name in _KEPT_BY_SERVER):
        said = conversation or read_conversation(fields)
        said.said(gist.text)
        for call in gist.tool_calls:
            said.called(call.id, call.name, call.arguments)
        reply = said.open_reply()
        if reply is not None:
            offers.append(_prefix(reply))
    return tuple(dict.fromkeys(offers))


def _sign(kind: int, name: str) -> bytes:
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=SIZE).digest()
    return bytes((kind,)) + digest[1:]


def _prefix(reply: tuple[bytes, bool]) -> bytes:
    digest, unique = reply
    return bytes((UNIQUE_PREFIX if unique else PREFIX,)) + digest[1:]
