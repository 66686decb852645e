"""`/v1/responses`: ids through `enable_response_messages`, log-probabilities through `include`.

What vLLM sends back for it stands in `input_messages`, `output_messages`, `top_logprobs` and
in each text's `logprobs` (`vllm/entrypoints/openai/responses/protocol.py`); it is put to what
vLLM sends those who did not ask: `null`, and `[]` in a text's deltas.

vLLM gives log-probabilities for texts only. A whole reply with any text carries those of all
its tokens; one of tool calls alone has none, and a stream lacks those of reasoning, of tool
calls and of the token that ends it: then counts differ, and the call is not trainable.
"""

from typing import Annotated, Any, Final

import msgspec

from proxy.dialects.base import (
    NULL,
    UNREADABLE,
    Gist,
    ModelRequest,
    Object,
    ReplyFacts,
    Transcript,
    decoded_object,
    own_name,
    parse_object,
    value_of,
    with_changes,
)
from proxy.dialects.events import EventStream
from proxy.trainable import Sampled
from store.records import ToolCall

IDS: Final = "enable_response_messages"
INCLUDE: Final = "include"
LOGPROBS: Final = "message.output_text.logprobs"
TOP: Final = "top_logprobs"
LAST_EVENTS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
# Any other item says that the server took turns of its own: several prompts, several samples.
OWN_ITEMS: Final = frozenset({"message", "reasoning", "function_call", "custom_tool_call"})
# vLLM calls them so beside the conversation in gpt-oss's own form, which has no ids.
RAW_TOKENS: Final = "raw_message_tokens"
EMPTY: Final = msgspec.Raw(b"[]")
UNTOLD: Final = (NULL, EMPTY)
# What reading a reply raises that is not of the API's shape: it is passed on as it came.
ODD_SHAPE: Final = (*UNREADABLE, KeyError, TypeError, ValueError)
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class ResponsesDialect(msgspec.Struct, frozen=True):
    """OpenAI's Responses API."""

    name: str = "responses"

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """See `Dialect`; what runs in the background answers before it has said anything."""
        fields = request.fields
        included = fields.get(INCLUDE)
        added: Object = {}
        if want_ids and isinstance(included, list | None) and fields.get("background") is not True:
            if fields.get(IDS) is not True:
                added[IDS] = msgspec.Raw(b"true")
            if LOGPROBS not in (included or ()):
                added[INCLUDE] = msgspec.Raw(msgspec.json.encode([*(included or ()), LOGPROBS]))
                # Without `include` no number of alternatives means anything; with it, one too
                # large would fail the call.
                if isinstance(fields.get(TOP), int) and fields[TOP] > 0:
                    added[TOP] = msgspec.Raw(b"0")
        return with_changes(request, served_name, added)

    def whole(
        self, request: ModelRequest, served_name: str | None, *, reading: bool = False
    ) -> Transcript:
        """See `Dialect`."""
        return WholeResponse(request, served_name)

    def streamed(
        self, request: ModelRequest, served_name: str | None, *, reading: bool = False
    ) -> Transcript:
        """See `Dialect`."""
        return StreamedResponse(request, served_name)


RESPONSES: Final = ResponsesDialect()


class _Undo:
    """Takes out of a reply what the request's rewriting put in, and gathers it."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        self._model = own_name(request, served_name)
        self._hide_ids = IDS in request.injected
        self._hide_logprobs = INCLUDE in request.injected
        self._prompts: list[list[int]] | None = None
        self._ids: list[list[int]] | None = None
        self._logprobs: list[float] = []
        self._one_sample = True

    @property
    def changes_nothing(self) -> bool:
        """Whether a reply goes through as it is."""
        return not (self._hide_ids or self._hide_logprobs or self._model)

    def response(self, response: Object) -> None:
        """Undo a response in place; its own tokens replace those of an earlier state."""
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
        items = _objects(response.get("output"))
        if items:
            for item in items:
                self._one_sample &= value_of(item.get("type")) in OWN_ITEMS
                self._logprobs += self.item(item)
            response["output"] = msgspec.Raw(msgspec.json.encode(items))

    def item(self, item: Object) -> list[float]:
        """Undo an output item in place; the log-probabilities it told."""
        found: list[float] = []
        parts = _objects(item.get("content"))
        if parts:
            for part in parts:
                found += self.text(part, NULL)
            item["content"] = msgspec.Raw(msgspec.json.encode(parts))
        return found

    def text(self, holder: Object, untold: msgspec.Raw) -> list[float]:
        """Undo a text, or a piece of one, in place; `untold` is what it says without."""
        told = holder.get("logprobs")
        if told is None or told in UNTOLD:
            return []
        if self._hide_logprobs:
            holder["logprobs"] = untold
        return [token.logprob for token in msgspec.json.decode(told, type=list[_Token])]

    def sampled(self, usage: dict[str, Any] | None) -> Sampled:
        """The ids, where there is one prompt and all that followed was sampled."""
        exact = self._one_sample and self._prompts is not None and len(self._prompts) == 1
        ids = self._ids if exact else None
        return Sampled(
            prompt_ids=tuple(self._prompts[0]) if exact and self._prompts else None,
            sampled_ids=None if ids is None else tuple(token for part in ids for token in part),
            sampled_logprobs=tuple(self._logprobs) or None,
            choices=1,
            completion_tokens=(usage or {}).get("output_tokens"),
        )


class _Token(msgspec.Struct):
    logprob: float


class _RawMessage(msgspec.Struct):
    type: str
    tokens: list[TokenId] | None = None


def _tokens(raw: msgspec.Raw | None) -> list[list[int]] | None:
    """The ids of each message; None where there are none."""
    if raw is None or raw in UNTOLD:
        return None
    messages = msgspec.json.decode(raw, type=list[_RawMessage])
    if any(message.type != RAW_TOKENS or message.tokens is None for message in messages):
        return None
    return [message.tokens or [] for message in messages]


def _objects(raw: msgspec.Raw | None) -> list[Object]:
    """A list's members, their values unparsed; none where it is no list."""
    if raw is None or bytes(raw)[:1] != b"[":
        return []
    return msgspec.json.decode(raw, type=list[Object])


class WholeResponse:
    """A reply in one piece."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        self._undo = _Undo(request, served_name)
        self._pieces: list[bytes] = []
        self._response: dict[str, Any] | None = None
        self._whole = False

    def feed(self, chunk: bytes) -> bytes:
        """See `Transcript`."""
        self._pieces.append(chunk)
        return b""

    def finish(self) -> bytes:
        """The restored reply; byte for byte the upstream's where nothing was added."""
        out = self._restored(b"".join(self._pieces))
        self._response, self._whole = decoded_object(out), True
        return out

    def _restored(self, body: bytes) -> bytes:
        parsed = parse_object(body)
        if parsed is None or parsed.keys().isdisjoint(("model", "output")):
            return body
        try:
            self._undo.response(parsed)
        except ODD_SHAPE:
            return body
        return body if self._undo.changes_nothing else msgspec.json.encode(parsed)

    @property
    def ended(self) -> bool:
        """See `Transcript`."""
        return self._whole

    def facts(self) -> ReplyFacts:
        """See `Transcript`."""
        return _facts(self._response, self._undo, whole=self._whole)

    def gist(self) -> Gist:
        """See `Transcript`."""
        return _gist(self._response or {}, _text_of(self._response or {}))


class StreamedResponse:
    """A reply as events, which carry the response at its beginning and at its end."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        self._undo = _Undo(request, served_name)
        self._events = EventStream(self._data, _is_end)
        self._response: dict[str, Any] | None = None
        self._deltas: list[str] = []
        self._unread = False

    def feed(self, chunk: bytes) -> bytes:
        """See `Transcript`."""
        return self._events.feed(chunk)

    def finish(self) -> bytes:
        """See `Transcript`."""
        return self._events.finish()

    @property
    def ended(self) -> bool:
        """See `Transcript`."""
        return self._events.ended and not self._unread

    def facts(self) -> ReplyFacts:
        """See `Transcript`."""
        whole = self._events.ended and not self._unread
        return _facts(self._response, self._undo, whole=whole)

    def gist(self) -> Gist:
        """See `Gist`; before the end, of texts alone."""
        return _gist(self._response or {}, "".join(self._deltas))

    def _data(self, payload: bytes) -> bytes:
        event = parse_object(payload)
        if event is None:
            self._unread = True
            return payload
        try:
            changed = self._read(event)
        except ODD_SHAPE:
            self._unread = True
            return payload
        if not changed or self._undo.changes_nothing:
            return payload
        return msgspec.json.encode(event)

    def _read(self, event: Object) -> bool:
        """Undo an event in place; whether it is one of those that may change."""
        kind = value_of(event.get("type"))
        if "response" in event:
            response = msgspec.json.decode(event["response"], type=Object)
            self._undo.response(response)
            event["response"] = msgspec.Raw(msgspec.json.encode(response))
            self._response = decoded_object(event["response"])
        elif kind == "response.output_text.delta":
            self._deltas.append(msgspec.json.decode(event["delta"], type=str))
            self._undo.text(event, EMPTY)
        elif kind == "response.content_part.done":
            part = msgspec.json.decode(event["part"], type=Object)
            self._undo.text(part, NULL)
            event["part"] = msgspec.Raw(msgspec.json.encode(part))
        elif kind == "response.output_item.done":
            item = msgspec.json.decode(event["item"], type=Object)
            self._undo.item(item)
            event["item"] = msgspec.Raw(msgspec.json.encode(item))
        else:
            return False
        return True


def _is_end(line: bytes) -> bool:
    name, _, value = line.partition(b":")
    return name == b"event" and value.strip().decode(errors="replace") in LAST_EVENTS


def _facts(response: dict[str, Any] | None, undo: _Undo, *, whole: bool) -> ReplyFacts:
    if response is None:
        return ReplyFacts(None, None, None, None, (), undo.sampled(None), whole)
    usage = response.get("usage") if isinstance(response.get("usage"), dict) else None
    return ReplyFacts(
        reply=msgspec.json.encode(response),
        response_id=_string(response.get("id")),
        finish=_string(response.get("status")),
        usage=usage,
        tool_calls=_tool_calls(response),
        sampled=undo.sampled(usage),
        whole=whole,
    )


def _gist(response: dict[str, Any], text: str) -> Gist:
    calls = _tool_calls(response)
    return Gist(response_id=_string(response.get("id")), text=text, tool_calls=calls)


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _members(holder: dict[str, Any], field: str, kind: str) -> list[dict[str, Any]]:
    found = holder.get(field)
    members = found if isinstance(found, list) else []
    return [m for m in members if isinstance(m, dict) and m.get("type") == kind]


def _text_of(response: dict[str, Any]) -> str:
    messages = _members(response, "output", "message")
    parts = (part for item in messages for part in _members(item, "content", "output_text"))
    return "".join(_string(part.get("text")) or "" for part in parts)


def _tool_calls(response: dict[str, Any]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            id=str(item.get("call_id")),
            name=str(item.get("name")),
            arguments=str(item.get("arguments")),
        )
        for item in _members(response, "output", "function_call")
    )
