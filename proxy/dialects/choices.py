"""The dialects that answer in `choices`: `/v1/chat/completions` and `/v1/completions`.

What we add: `return_token_ids`, `logprobs` and the version's name as `model`. What comes
back for it is put to `null` again, as vLLM sends it to those who did not ask, the model's
name is put back, and the extra chunks with an empty delta that ids ride on are not passed on.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import msgspec

from proxy.dialects.base import (
    NULL,
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
from proxy.dialects.events import EventStream, is_done
from proxy.dialects.merge import merge_delta
from proxy.trainable import Sampled
from store.records import ToolCall

DONE: Final = b"[DONE]"
IDS: Final = "return_token_ids"
LOGPROBS: Final = "logprobs"
# What reading a reply raises that is not of the API's shape. Such a reply is passed on as it
# came, and its call is not trainable.
ODD_SHAPE: Final = (msgspec.MsgspecError, KeyError, TypeError, AttributeError, ValueError)


class ChoicesDialect(msgspec.Struct, frozen=True):
    """Chat completions or text completions.

    `wanted` are the fields that make vLLM give ids and log-probabilities; `asked` says
    whether a client's own value of one already does.
    """

    name: str
    reply_object: str
    wanted: Mapping[str, msgspec.Raw]
    asked: Callable[[str, Any], bool]

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """See `Dialect`."""
        added: Object = {
            field: value
            for field, value in self.wanted.items()
            if want_ids and not self.asked(field, request.fields.get(field))
        }
        return with_changes(request, served_name, added)

    def whole(self, request: ModelRequest, served_name: str | None) -> Transcript:
        """See `Dialect`."""
        return WholeReply(request, served_name)

    def streamed(self, request: ModelRequest, served_name: str | None) -> Transcript:
        """See `Dialect`."""
        return StreamedReply(request, served_name, self.reply_object)


CHAT: Final = ChoicesDialect(
    name="chat",
    reply_object="chat.completion",
    wanted={LOGPROBS: msgspec.Raw(b"true"), IDS: msgspec.Raw(b"true")},
    asked=lambda _field, value: value is True,
)
COMPLETIONS: Final = ChoicesDialect(
    name="completions",
    reply_object="text_completion",
    # Here `logprobs` is a number: how many alternatives beside the sampled token.
    wanted={LOGPROBS: msgspec.Raw(b"0"), IDS: msgspec.Raw(b"true")},
    asked=lambda field, value: value is True if field == IDS else value is not None,
)


class _Undo:
    """Takes out of a reply what the request's rewriting put in, and gathers it."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        self.hide_ids = IDS in request.injected
        self._hide_logprobs = LOGPROBS in request.injected
        self._model = own_name(request, served_name)
        self.prompt_ids: list[int] | None = None
        self.sampled_ids: list[int] | None = None
        self.sampled_logprobs: list[float] | None = None
        self.indices: set[int] = set()

    @property
    def changes_nothing(self) -> bool:
        """Whether a reply goes through as it is."""
        return not (self.hide_ids or self._hide_logprobs or self._model)

    def try_restore(self, parsed: Object) -> list[Object] | None:
        """`restore`, or None for a reply of another shape than the API's: it is passed on as is."""
        try:
            return self.restore(parsed)
        except ODD_SHAPE:
            return None

    def restore(self, parsed: Object) -> list[Object]:
        """Undo in place; returns the choices, for what else is to be read from them."""
        if self._model is not None and "model" in parsed:
            parsed["model"] = self._model
        self._take_prompt(parsed)
        raw_choices = parsed.get("choices")
        if raw_choices is None or bytes(raw_choices)[:1] != b"[":
            return []
        choices = msgspec.json.decode(raw_choices, type=list[Object])
        for choice in choices:
            self._take_choice(choice)
        parsed["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        return choices

    def _take_prompt(self, holder: Object) -> None:
        """Prompt ids stand beside the choices in a chat, and in each choice in a completion."""
        prompt_ids = value_of(holder.get("prompt_token_ids"))
        if prompt_ids is not None:
            self.prompt_ids = _ids(prompt_ids)
            if self.hide_ids:
                holder["prompt_token_ids"] = NULL

    def _take_choice(self, choice: Object) -> None:
        self.indices.add(int(value_of(choice.get("index")) or 0))
        self._take_prompt(choice)
        ids = value_of(choice.get("token_ids"))
        if ids is not None:
            self.sampled_ids = (self.sampled_ids or []) + _ids(ids)
            if self.hide_ids:
                choice["token_ids"] = NULL
        logprobs = value_of(choice.get("logprobs"))
        if logprobs is not None:
            self.sampled_logprobs = (self.sampled_logprobs or []) + _values(logprobs)
            if self._hide_logprobs:
                choice["logprobs"] = NULL

    def sampled(self, usage: dict[str, Any] | None) -> Sampled:
        return Sampled(
            prompt_ids=_tuple(self.prompt_ids),
            sampled_ids=_tuple(self.sampled_ids),
            sampled_logprobs=_tuple(self.sampled_logprobs),
            choices=len(self.indices),
            completion_tokens=(usage or {}).get("completion_tokens"),
        )


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


def _ids(value: Any) -> list[int]:
    return msgspec.convert(value, list[TokenId])


def _values(logprobs: dict[str, Any]) -> list[float]:
    """Log-probabilities in either form; an echoed prompt's first token has none (null)."""
    if "token_logprobs" in logprobs:
        found = [value for value in logprobs["token_logprobs"] if value is not None]
    else:
        found = [token["logprob"] for token in logprobs.get("content") or []]
    return msgspec.convert(found, list[float])


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _tool_calls(message: Any) -> tuple[ToolCall, ...]:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    found = []
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and call.get("id"):
            found.append(
                ToolCall(
                    id=str(call["id"]),
                    name=str(function.get("name") or ""),
                    arguments=str(function.get("arguments") or ""),
                )
            )
    return tuple(found)


class WholeReply:
    """A reply that comes in one piece: nothing leaves before all of it is there."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        self._undo = _Undo(request, served_name)
        self._pieces: list[bytes] = []
        self._facts: ReplyFacts | None = None

    def feed(self, chunk: bytes) -> bytes:
        """Keep; see `Transcript`."""
        self._pieces.append(chunk)
        return b""

    def finish(self) -> bytes:
        """The restored reply; byte for byte the upstream's where nothing was added."""
        body = b"".join(self._pieces)
        parsed = parse_object(body)
        if parsed is None:
            self._facts = _facts(None, {}, self._undo, whole=True)
            return body
        read = self._undo.try_restore(parsed) is not None
        out = msgspec.json.encode(parsed) if read and not self._undo.changes_nothing else body
        whole = decoded_object(out)
        self._facts = _facts(out if whole else None, whole or {}, self._undo, whole=True)
        return out

    def facts(self) -> ReplyFacts:
        """See `Transcript`."""
        if self._facts is not None:
            return self._facts
        return _facts(None, {}, self._undo, whole=False)


def _facts(reply: bytes | None, parsed: dict[str, Any], undo: _Undo, *, whole: bool) -> ReplyFacts:
    choices = parsed.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    first = first if isinstance(first, dict) else {}
    usage = parsed.get("usage") if isinstance(parsed.get("usage"), dict) else None
    return ReplyFacts(
        reply=reply,
        response_id=_text(parsed.get("id")),
        finish=_text(first.get("finish_reason")),
        usage=usage,
        tool_calls=_tool_calls(first.get("message")),
        sampled=undo.sampled(usage),
        whole=whole,
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


class StreamedReply:
    """A reply as server-sent events, put together as it passes."""

    def __init__(self, request: ModelRequest, served_name: str | None, reply_object: str) -> None:
        self._undo = _Undo(request, served_name)
        self._reply_object = reply_object
        self._events = EventStream(self._data, is_done)
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._unread = 0

    def feed(self, chunk: bytes) -> bytes:
        """See `Transcript`."""
        return self._events.feed(chunk)

    def finish(self) -> bytes:
        """See `Transcript`."""
        return self._events.finish()

    def _data(self, payload: bytes) -> bytes | None:
        if payload == DONE:
            return payload
        parsed = parse_object(payload)
        choices = None if parsed is None else self._undo.try_restore(parsed)
        if parsed is None or choices is None:
            self._unread += 1
            return payload
        out = payload if self._undo.changes_nothing else msgspec.json.encode(parsed)
        try:
            if self._rides_on_nothing(parsed, choices):
                return None
            self._gather(msgspec.json.decode(out))
        except ODD_SHAPE:
            self._unread += 1
        return out

    def _rides_on_nothing(self, parsed: Object, choices: list[Object]) -> bool:
        """A chunk that is there only for its ids (vLLM parsers do)."""
        return (
            self._undo.hide_ids
            and bool(choices)
            and value_of(parsed.get("usage")) is None
            and all(
                value_of(choice.get("delta")) == {}
                and value_of(choice.get("finish_reason")) is None
                for choice in choices
            )
        )

    def _gather(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices") or []:
            known = self._choices.setdefault(choice.get("index", 0), {})
            if "delta" in choice:
                merge_delta(known.setdefault("message", {}), choice["delta"] or {})
            if "text" in choice:
                known["text"] = known.get("text", "") + choice["text"]
            known |= {
                name: value
                for name, value in choice.items()
                if name not in ("delta", "text") and (value is not None or name not in known)
            }
        self._head |= {
            name: value
            for name, value in event.items()
            if name != "choices" and (value is not None or name not in self._head)
        }

    def facts(self) -> ReplyFacts:
        """See `Transcript`; the events put together into one `chat.completion`."""
        if not self._head and not self._choices:
            return _facts(None, {}, self._undo, whole=self._events.ended)
        choices = [self._choices[index] for index in sorted(self._choices)]
        reply = self._head | {"object": self._reply_object, "choices": choices}
        # Not every server sends [DONE]; a reason to finish in each choice says as much.
        finished = bool(choices) and all(choice.get("finish_reason") for choice in choices)
        whole = (self._events.ended or finished) and not self._unread
        return _facts(msgspec.json.encode(reply), reply, self._undo, whole=whole)
