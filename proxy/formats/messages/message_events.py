"""Turn a chat completion into Anthropic's message, whole or as events (pure).

The events are those that vLLM makes of its own chat completions for `/v1/messages`
(`vllm/entrypoints/anthropic/serving.py`), as https://docs.anthropic.com/en/api/messages-streaming
defines them. vLLM draws signatures at random; here they are derived from the reply's id.
"""

import json
from hashlib import sha256
from typing import Any, Final

import msgspec

from proxy.formats.choices.chat_reply import (
    ChatChoice,
    ChatMessage,
    ChatReply,
    ChatToolCall,
    ChatUsage,
)

Event = dict[str, Any]
NO_MESSAGE: Final = ChatMessage()


def encode_event(event: Event) -> bytes:
    """Return an event as bytes of a stream."""
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def usage_of(usage: ChatUsage | None) -> dict[str, int]:
    """Return Anthropic's usage; it counts cached tokens beside the input, OpenAI's within it."""
    if usage is None:
        return {"input_tokens": 0, "output_tokens": 0}
    details = usage.prompt_tokens_details
    cached = {
        "cache_creation_input_tokens": None if details is None else details.created_cache_tokens,
        "cache_read_input_tokens": None if details is None else details.cached_tokens,
    }
    present = {name: count for name, count in cached.items() if count is not None}
    fresh = max(0, usage.prompt_tokens - sum(present.values()))
    return {"input_tokens": fresh, "output_tokens": usage.completion_tokens or 0} | present


def stop_reason(
    finish: str | None, stop: int | str | None, *, tool_used: bool, tool_complete: bool
) -> tuple[str | None, str | None]:
    """Return a message's `stop_reason` and `stop_sequence`.

    A stop string that cut a tool call short takes precedence: half a call must not be run.

    Args:
        finish: the completion's `finish_reason`.
        stop: the string or token that stopped it, if any.
        tool_used: the reply calls a tool.
        tool_complete: the arguments of its last tool call are whole.
    """
    if finish == "length":
        return "max_tokens", None
    if finish not in ("stop", "tool_calls"):
        return None, None
    if tool_complete:
        return "tool_use", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return ("tool_use" if tool_used or finish == "tool_calls" else "end_turn"), None


def signature_of(reply_id: str | None, index: int) -> str:
    """Return a thinking block's signature, which clients send back and nobody verifies."""
    return sha256(f"{reply_id}/{index}".encode()).hexdigest()[:32]


def whole_message(reply: ChatReply, choice: ChatChoice, model: str | None) -> dict[str, Any]:
    """Return the message that a whole chat completion makes."""
    answer = choice.message or NO_MESSAGE
    calls = answer.tool_calls or []
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        signature = signature_of(reply.id, 0)
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": signature})
    if answer.content:
        content.append({"type": "text", "text": answer.content})
    content += [_tool_use(call) for call in calls]
    reason, sequence = stop_reason(
        choice.finish_reason, choice.stop_reason, tool_used=bool(calls), tool_complete=bool(calls)
    )
    ended = {"stop_reason": reason, "stop_sequence": sequence}
    return (
        {"id": reply.id, "type": "message", "role": "assistant"}
        | {"content": content or [{"type": "text", "text": ""}], "model": model}
        | {name: value for name, value in ended.items() if value is not None}
        | {"usage": usage_of(reply.usage)}
    )


def _tool_use(call: ChatToolCall) -> dict[str, Any]:
    block = {"type": "tool_use", "id": call.id, "name": call.function.name}
    return block | {"input": _input(call.function.arguments or "")}


def _input(arguments: str) -> msgspec.Raw:
    """Return arguments in the form of vLLM's JSON; an empty object if they are not one."""
    try:
        value = json.loads(arguments)
        if not isinstance(value, dict):
            return msgspec.Raw(b"{}")
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return msgspec.Raw(b"{}")
    # A lone surrogate cannot be encoded as UTF-8, only as an escape.
    return msgspec.Raw(text.encode(errors="backslashreplace"))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class MessageEvents:
    """Turn a completion's chunks into events; `model`, if given, replaces the model's name."""

    def __init__(self, model: str | None) -> None:
        """Begin before the first chunk."""
        self._model = model
        self._id: str | None = None
        self._started = False
        self._index = 0
        self._open: str | None = None
        self._tool: str | None = None
        self._tools: dict[int, str] = {}
        # The arguments in the last tool's block; None before there is one.
        self._arguments: list[str] | None = None
        # Text within a tool's block waits for the block's end.
        self._waiting: list[str] = []
        self._finish: str | None = None
        self._stop: int | str | None = None

    def take(self, chunk: ChatReply) -> list[Event]:
        """Return a chunk's events; the first opens the message, one without choices ends it."""
        if not self._started:
            return [self._start(chunk)]
        if not chunk.choices:
            return [*self._close(), self._end(chunk.usage)]
        choice = chunk.choices[0]
        if choice.finish_reason is not None:
            self._finish, self._stop = choice.finish_reason, choice.stop_reason
        return self._said(choice.delta or NO_MESSAGE)

    def stop(self) -> list[Event]:
        """Return the last events."""
        return [*self._close(), {"type": "message_stop"}]

    def _start(self, chunk: ChatReply) -> Event:
        self._started, self._id = True, chunk.id
        message: Event = {"id": chunk.id, "type": "message", "role": "assistant", "content": []}
        message |= {"model": self._model or chunk.model, "stop_reason": None}
        message |= {"stop_sequence": None, "usage": usage_of(chunk.usage)}
        return {"type": "message_start", "message": message}

    def _end(self, usage: ChatUsage | None) -> Event:
        arguments = self._arguments
        reason, sequence = stop_reason(
            self._finish or "stop",
            self._stop,
            tool_used=arguments is not None,
            tool_complete=arguments is not None and _is_json("".join(arguments)),
        )
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return {"type": "message_delta", "delta": delta, "usage": usage_of(usage)}

    def _said(self, delta: ChatMessage) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._piece("thinking", delta.reasoning)
        if delta.content and self._open == "tool_use":
            self._waiting.append(delta.content)
        elif delta.content:
            events += self._piece("text", delta.content)
        for call in delta.tool_calls or ():
            events += self._call(call)
        return events

    def _piece(self, kind: str, text: str) -> list[Event]:
        """Return the events of a piece of text or thinking, within a block of its kind."""
        events = [] if self._open == kind else [*self._close(), self._block(kind, {kind: ""})]
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: ChatToolCall) -> list[Event]:
        events: list[Event] = []
        name, arguments = call.function.name, call.function.arguments
        if call.id is not None:
            self._tools[call.index] = call.id
            if self._tool != call.id and name is not None:
                tool_use = {"id": call.id, "name": name, "input": {}}
                events = [*self._close(), self._block("tool_use", tool_use)]
                self._tool, self._arguments = call.id, []
        running = self._tool is not None and self._tool == self._tools.get(call.index)
        if arguments and running and self._arguments is not None:
            self._arguments.append(arguments)
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _block(self, kind: str, content: dict[str, Any]) -> Event:
        self._open = kind
        block = {"type": kind} | content
        return {"type": "content_block_start", "content_block": block, "index": self._index}

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "delta": delta, "index": self._index}

    def _close(self) -> list[Event]:
        """Return the events that end the open block, and the text that waited for its end."""
        waiting, self._waiting = "".join(self._waiting), []
        events = self._end_block()
        if waiting:
            events += [*self._piece("text", waiting), *self._end_block()]
        return events

    def _end_block(self) -> list[Event]:
        if self._open is None:
            return []
        events: list[Event] = []
        if self._open == "thinking":
            signature = signature_of(self._id, self._index)
            events.append(self._delta({"type": "signature_delta", "signature": signature}))
        events.append({"type": "content_block_stop", "index": self._index})
        self._index += 1
        self._open = self._tool = None
        return events
