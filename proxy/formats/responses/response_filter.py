"""Remove from a response what was added because of the request's rewriting (pure)."""

from typing import Annotated, Any, Final

import msgspec

from proxy.formats.base import ModelRequest, Object, Sampled
from proxy.formats.requests import NULL, UNREADABLE, own_name, value_of
from proxy.formats.unparsed import NUMBER, JsonMember, without

IDS: Final = "enable_response_messages"
INCLUDE: Final = "include"
TOP: Final = "top_logprobs"
# Any other item means that the server took turns of its own: several prompts, several samples.
OWN_ITEMS: Final = frozenset({"message", "reasoning", "function_call", "custom_tool_call"})
THOUGHT: Final = "reasoning"
# With a false one, vLLM leaves thoughts out of the reply.
SHOWS_THOUGHTS: Final = "include_reasoning"
# vLLM's type of messages with token ids; those in gpt-oss's own form have none.
RAW_TOKENS: Final = "raw_message_tokens"
EMPTY: Final = msgspec.Raw(b"[]")
DELTA: Final = b"response.output_text.delta"
UNTOLD: Final = (NULL, EMPTY)
# Errors of reading a reply that is not of the API's shape. It is passed on as it came, without
# what was added, wherever that stands.
ODD_SHAPE: Final = (*UNREADABLE, KeyError, TypeError, ValueError)
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class ResponseFilter:
    """Restore a response or its events, and gather the token data that this removes."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin with what `request` was given beside the client's own fields."""
        self._model = own_name(request, served_name)
        self._hide_ids = IDS in request.injected
        self._hide_logprobs = INCLUDE in request.injected
        self._thinks = request.fields.get(SHOWS_THOUGHTS) not in (None, True)
        self._prompts: list[list[int]] | None = None
        self._ids: list[list[int]] | None = None
        self._logprobs: list[float] = []
        self._one_sample = True
        self._members = self._added_members(served_name)

    def _added_members(self, served_name: str | None) -> dict[bytes, JsonMember]:
        members: dict[bytes, JsonMember] = {}
        if self._hide_ids:
            members |= dict.fromkeys(
                (b"input_messages", b"output_messages"), JsonMember(opens=b"[")
            )
        if self._hide_logprobs:
            members[TOP.encode()] = JsonMember(opens=NUMBER)
            members[b"logprobs"] = JsonMember(opens=b"[", unless_empty=True)
        if self._model is not None:
            served = msgspec.json.encode(served_name)
            members[b"model"] = JsonMember(opens=b'"', instead=bytes(self._model), only=served)
        return members

    def hide(self, payload: bytes) -> bytes:
        """Return a payload that cannot be parsed with the values of added members replaced."""
        members = self._members
        if b"logprobs" in members and DELTA in payload:
            members = members | {
                b"logprobs": JsonMember(opens=b"[", instead=b"[]", unless_empty=True)
            }
        return without(payload, members)

    @property
    def changes_nothing(self) -> bool:
        """Return whether a reply goes through unchanged."""
        return not (self._hide_ids or self._hide_logprobs or self._model)

    def response(self, response: Object) -> None:
        """Restore a response in place; its token data replaces that of an earlier event."""
        if self._model is not None and "model" in response:
            response["model"] = self._model
        self._prompts = _tokens(response.get("input_messages"))
        self._ids = _tokens(response.get("output_messages"))
        for name in ("input_messages", "output_messages"):
            if self._hide_ids and name in response:
                response[name] = NULL
        if self._hide_logprobs and TOP in response:
            response[TOP] = NULL
        self._logprobs = []
        items = objects_of(response.get("output"))
        if items:
            for item in items:
                kind = value_of(item.get("type"))
                self._one_sample &= kind in OWN_ITEMS
                self._thinks |= kind == THOUGHT
                self._logprobs += self.item(item)
            response["output"] = msgspec.Raw(msgspec.json.encode(items))

    def item(self, item: Object) -> list[float]:
        """Restore an output item in place, and return its log-probabilities."""
        logprobs: list[float] = []
        parts = objects_of(item.get("content"))
        if parts:
            for part in parts:
                logprobs += self.text(part, NULL)
            item["content"] = msgspec.Raw(msgspec.json.encode(parts))
        return logprobs

    def text(self, holder: Object, untold: msgspec.Raw) -> list[float]:
        """Restore a text, or a piece of one, in place, and return its log-probabilities.

        `untold` is the value of `logprobs` in a text for which none were asked.
        """
        logprobs = holder.get("logprobs")
        if logprobs is None or logprobs in UNTOLD:
            return []
        if self._hide_logprobs:
            holder["logprobs"] = untold
        return [token.logprob for token in msgspec.json.decode(logprobs, type=list[_Token])]

    def sampled(self, usage: dict[str, Any] | None) -> Sampled:
        """Return the token data; the ids only if there was one prompt and all else was sampled.

        vLLM gives log-probabilities of texts only. They count if they are as many as the ids: of
        fewer it cannot be told whose they are.
        """
        prompts, replies = self._prompts or [], self._ids or []
        exact = self._one_sample and len(prompts) == 1
        ids = tuple(replies[0]) if exact and len(replies) == 1 else None
        complete = ids is not None and len(self._logprobs) == len(ids)
        return Sampled(
            prompt_ids=tuple(prompts[0]) if exact else None,
            sampled_ids=ids,
            sampled_logprobs=tuple(self._logprobs) if complete else None,
            choices=1,
            completion_tokens=(usage or {}).get("output_tokens"),
            thoughtless=not self._thinks and _thinking_tokens(usage) == 0,
        )


class _Token(msgspec.Struct):
    logprob: float


class _RawMessage(msgspec.Struct):
    type: str
    tokens: list[TokenId] | None = None


def _thinking_tokens(usage: dict[str, Any] | None) -> Any:
    """Return how many tokens of thoughts were counted, or None if it is not told."""
    details = (usage or {}).get("output_tokens_details")
    return details.get("reasoning_tokens") if isinstance(details, dict) else None


def _tokens(raw: msgspec.Raw | None) -> list[list[int]] | None:
    """Return the ids of each message, or None if there are none."""
    if raw is None or raw in UNTOLD:
        return None
    messages = msgspec.json.decode(raw, type=list[_RawMessage])
    if any(message.type != RAW_TOKENS or message.tokens is None for message in messages):
        return None
    return [message.tokens or [] for message in messages]


def objects_of(raw: msgspec.Raw | None) -> list[Object]:
    """Return a list's members with values unparsed; nothing if the value is not a list."""
    if raw is None or bytes(raw)[:1] != b"[":
        return []
    return msgspec.json.decode(raw, type=list[Object])
