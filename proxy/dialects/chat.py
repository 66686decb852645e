"""`/v1/chat/completions`, streamed and not.

What we add: `return_token_ids`, `logprobs` and the version's name as `model`. What comes
back for it is put to `null` again, as vLLM sends it to those who did not ask, the model's
name is put back, and the extra chunks with an empty delta that ids ride on are not passed on.
"""

from typing import Any, Final

import msgspec

from proxy.dialects.base import (
    NULL,
    ChatRequest,
    Object,
    ReplyFacts,
    parse_object,
    readable_value,
    value_of,
)
from proxy.dialects.merge import merge_delta
from proxy.trainable import Sampled
from store.records import ToolCall

DONE: Final = b"[DONE]"
IDS: Final = "return_token_ids"
LOGPROBS: Final = "logprobs"
_TRUE: Final = msgspec.Raw(b"true")


def read_request(body: bytes) -> ChatRequest:
    """A request as the client sent it.

    A body that is no JSON object is kept as it is: the upstream says what is wrong with it.
    """
    parsed = parse_object(body)
    if parsed is None:
        return ChatRequest(body=body)
    fields = {name: readable_value(raw) for name, raw in parsed.items()}
    model = fields.get("model")
    return ChatRequest(
        body=body,
        parsed=parsed,
        fields=fields,
        model=model if isinstance(model, str) else None,
        stream=fields.get("stream") is True,
    )


def rewrite_request(
    request: ChatRequest, served_name: str | None, *, want_ids: bool
) -> ChatRequest:
    """The request for the upstream; the client's own bytes where nothing must change."""
    if request.parsed is None:
        return request
    changes: Object = {}
    if served_name is not None and served_name != request.model:
        changes["model"] = msgspec.Raw(msgspec.json.encode(served_name))
    injected = frozenset(
        name for name in (IDS, LOGPROBS) if want_ids and request.fields.get(name) is not True
    )
    changes |= dict.fromkeys(sorted(injected), _TRUE)
    if not changes:
        return request
    body = msgspec.json.encode(request.parsed | changes)
    return msgspec.structs.replace(request, body=body, injected=injected)


class _Undo:
    """Takes out of a reply what the request's rewriting put in, and gathers it."""

    def __init__(self, request: ChatRequest, served_name: str | None) -> None:
        self.hide_ids = IDS in request.injected
        self._hide_logprobs = LOGPROBS in request.injected
        renamed = served_name is not None and served_name != request.model
        self._model = (
            msgspec.Raw(msgspec.json.encode(request.model)) if renamed and request.model else None
        )
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
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            return None

    def restore(self, parsed: Object) -> list[Object]:
        """Undo in place; returns the choices, for what else is to be read from them."""
        if self._model is not None and "model" in parsed:
            parsed["model"] = self._model
        prompt_ids = value_of(parsed.get("prompt_token_ids"))
        if prompt_ids is not None:
            self.prompt_ids = prompt_ids
            if self.hide_ids:
                parsed["prompt_token_ids"] = NULL
        raw_choices = parsed.get("choices")
        if raw_choices is None or bytes(raw_choices)[:1] != b"[":
            return []
        choices = msgspec.json.decode(raw_choices, type=list[Object])
        for choice in choices:
            self._take_choice(choice)
        parsed["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        return choices

    def _take_choice(self, choice: Object) -> None:
        self.indices.add(value_of(choice.get("index")) or 0)
        ids = value_of(choice.get("token_ids"))
        if ids is not None:
            self.sampled_ids = (self.sampled_ids or []) + ids
            if self.hide_ids:
                choice["token_ids"] = NULL
        logprobs = value_of(choice.get("logprobs"))
        if logprobs is not None:
            content = logprobs.get("content") or []
            values = [token["logprob"] for token in content]
            self.sampled_logprobs = (self.sampled_logprobs or []) + values
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


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _tool_calls(message: dict[str, Any]) -> tuple[ToolCall, ...]:
    found = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        if call.get("id"):
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

    def __init__(self, request: ChatRequest, served_name: str | None) -> None:
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
        self._facts = _facts(out, msgspec.json.decode(out), self._undo, whole=True)
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
    response_id = parsed.get("id")
    return ReplyFacts(
        reply=reply,
        response_id=response_id if isinstance(response_id, str) else None,
        finish=first.get("finish_reason"),
        usage=usage,
        tool_calls=_tool_calls(first.get("message") or {}),
        sampled=undo.sampled(usage),
        whole=whole,
    )


class StreamedReply:
    """A reply as server-sent events (WHATWG HTML §9.2), followed line by line.

    Every complete line leaves at once; from `data: [DONE]` on, bytes are held back.
    """

    def __init__(self, request: ChatRequest, served_name: str | None) -> None:
        self._undo = _Undo(request, served_name)
        self._partial = b""
        self._held = b""
        self._ended = False
        self._skip_blank = False
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._unread = 0

    def feed(self, chunk: bytes) -> bytes:
        """See `Transcript`."""
        if self._ended:
            self._held += chunk
            return b""
        lines = (self._partial + chunk).split(b"\n")
        self._partial = lines.pop()
        out = []
        for position, line in enumerate(lines):
            if self._is_done(line):
                self._ended = True
                self._held = b"\n".join([*lines[position:], self._partial])
                self._partial = b""
                break
            out.append(self._line(line + b"\n"))
        return b"".join(out)

    def finish(self) -> bytes:
        """See `Transcript`: the end marker, or what an unfinished line left."""
        if not self._ended and self._is_done(self._partial):
            self._ended = True
        held, self._held = self._held + self._partial, b""
        self._partial = b""
        return held

    @staticmethod
    def _is_done(line: bytes) -> bool:
        return line.startswith(b"data:") and line[5:].strip() == DONE

    def _line(self, line: bytes) -> bytes:
        if not line.strip():
            skip, self._skip_blank = self._skip_blank, False
            return b"" if skip else line
        if not line.startswith(b"data:"):
            return line
        payload = line[5:].strip()
        parsed = parse_object(payload)
        choices = None if parsed is None else self._undo.try_restore(parsed)
        if parsed is None or choices is None:
            self._unread += 1
            return line
        if self._rides_on_nothing(parsed, choices):
            self._skip_blank = True
            return b""
        out = payload if self._undo.changes_nothing else msgspec.json.encode(parsed)
        self._gather(msgspec.json.decode(out))
        return line.replace(payload, out, 1) if out is not payload else line

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

    @property
    def _undo_injected(self) -> frozenset[str]:
        return frozenset([IDS] if self._undo.hide_ids else [])

    def _gather(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices") or []:
            known = self._choices.setdefault(choice.get("index", 0), {"message": {}})
            merge_delta(known["message"], choice.get("delta") or {})
            known |= {
                name: value
                for name, value in choice.items()
                if name != "delta" and (value is not None or name not in known)
            }
        self._head |= {
            name: value
            for name, value in event.items()
            if name != "choices" and (value is not None or name not in self._head)
        }

    def facts(self) -> ReplyFacts:
        """See `Transcript`; the events put together into one `chat.completion`."""
        if not self._head and not self._choices:
            return _facts(None, {}, self._undo, whole=self._ended)
        choices = [self._choices[index] for index in sorted(self._choices)]
        reply = self._head | {"object": "chat.completion", "choices": choices}
        whole = self._ended and not self._unread
        return _facts(msgspec.json.encode(reply), reply, self._undo, whole=whole)
