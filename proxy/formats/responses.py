"""Wire format of `/v1/responses` (pure).

Ids are requested by `enable_response_messages`, log-probabilities by `include`.

vLLM's additional values stand in `input_messages`, `output_messages`, `top_logprobs` and in each
text's `logprobs` (`vllm/entrypoints/openai/responses/protocol.py`). They are replaced by the
values vLLM sends if they are not requested: `null`, and `[]` in a text's deltas.

vLLM gives log-probabilities for texts only. A whole reply with any text has them for all its
tokens; a reply of tool calls alone has none, and a stream lacks them for reasoning, tool calls and
the token that ends it. The ids are complete all the same: vLLM gathers them from the engine
itself (`SimpleContext` in its `responses/context.py`). If some log-probabilities are missing, none
are recorded, and the trainer computes them (docs/decisions/042-without-log-probabilities.md), under
the mask of the reply's grammar, if any.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from proxy.formats.base import (
    EVENT,
    ModelRequest,
    ReplyFacts,
    ReplyParser,
    ReplySummary,
    SampledTokens,
    UnreadableEvent,
    WireFormat,
    with_changes,
)
from proxy.formats.choices import PIECE_BYTES, TokenLogprob
from proxy.formats.conversation import (
    SYSTEM_ROLES,
    TOOL_ROLES,
    Calls,
    Conversation,
    ShownToolCall,
    ToolResult,
    Turns,
    blocks_of,
    is_only_text,
    is_text,
    tool_result,
)
from proxy.formats.errors import ResponsesErrors
from proxy.formats.raw_json import (
    ARRAY,
    NULL,
    NUMBER,
    ODD_SHAPE,
    STRING,
    Object,
    Replacement,
    TokenId,
    decoded_object,
    parse_object,
    readable_value,
    string_or_none,
    value_of,
)
from proxy.formats.sampling import (
    HARMLESS_FIELDS,
    SamplingRules,
    forced_call,
    functions_if_well_formed,
    grammar_of,
    has_free_form,
    is_free_choice,
)
from store.records import ToolCall

PREVIOUS: Final = "previous_response_id"
# With either of these the server keeps the conversation, and a request shows only new items.
KEPT_BY_SERVER: Final = (PREVIOUS, "conversation")
RESULT_TYPES: Final = ("function_call_output", "custom_tool_call_output")
# Endings of the types of items, besides messages, that the client adds.
CLIENT_ITEM_SUFFIXES: Final = ("_output", "_response")
# Types of items without a role that are text; other types may hold anything (a screenshot).
TEXT_ITEMS: Final = frozenset(
    {
        *("message", "reasoning", "function_call", "custom_tool_call", *RESULT_TYPES),
        *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("web_search_call", "file_search_call", "compaction"),
    }
)


class ResponsesTurns(Turns):
    """Reader of a request's input, which may continue an earlier response kept by the server."""

    field = "input"
    instructions = "instructions"
    continued_by_id = True

    def continued_reply_id(self, fields: Mapping[str, Any]) -> str | None:
        previous = fields.get(PREVIOUS)
        return previous if isinstance(previous, str) and previous else None

    def shows_all(self, fields: Mapping[str, Any]) -> bool:
        return not any(fields.get(name) for name in KEPT_BY_SERVER)

    def read(self, fields: Mapping[str, Any]) -> Conversation:
        """Return the conversation that a request shows; an input that is a string is a user's."""
        given = fields.get(self.field)
        if not isinstance(given, str):
            return super().read(fields)
        conversation = Conversation()
        conversation.add_user(given)
        return conversation

    def user_contents(self, parsed: Object) -> Iterable[msgspec.Raw]:
        """Return the contents of user messages; an input that is a string is a user's."""
        given = parsed.get(self.field, NULL)
        is_one_text = memoryview(given)[0] in STRING
        return [given] if is_one_text else super().user_contents(parsed)

    def only_text(self, parsed: Object) -> bool:
        """Return whether the input in the request is all text.

        The variables that it gives for a prompt template kept by the server must be text, too.
        """
        prompt = readable_value(parsed.get("prompt", NULL))
        filled = prompt.get("variables") if isinstance(prompt, dict) else None
        values = filled.values() if isinstance(filled, dict) else ()
        return all(map(is_text, values)) and super().only_text(parsed)

    def _is_text(self, member: Object) -> bool:
        """Return whether an item, its content and its output are all text."""
        kind = readable_value(member.get("type", NULL))
        known = "role" in member or (isinstance(kind, str) and kind in TEXT_ITEMS)
        return known and is_only_text(member.get("output")) and super()._is_text(member)

    def _add(self, conversation: Conversation, member: dict[str, Any]) -> None:
        kind, role = member.get("type"), member.get("role")
        if role == "assistant":
            conversation.add_assistant(member.get("content"))
        elif role in TOOL_ROLES:
            conversation.add_tool_result(member.get("tool_call_id"), member.get("content"))
        elif isinstance(role, str):
            if role not in SYSTEM_ROLES:
                conversation.add_user(member.get("content"))
        elif kind == "function_call":
            conversation.add_tool_call(
                member.get("call_id"), member.get("name"), member.get("arguments")
            )
        elif isinstance(kind, str) and kind.endswith("_output"):
            conversation.add_tool_result(member.get("call_id"), member.get("output"))

    def _is_by_assistant(self, member: dict[str, Any]) -> bool:
        """Return whether a member is an assistant message, or an item that the model made.

        An item without a role is the client's if its type ends in one of `CLIENT_ITEM_SUFFIXES`.
        """
        role, kind = member.get("role"), member.get("type")
        if isinstance(role, str):
            return role == "assistant"
        return isinstance(kind, str) and not kind.endswith(CLIENT_ITEM_SUFFIXES)

    def _tool_calls(self, member: dict[str, Any]) -> Iterable[ShownToolCall]:
        is_custom = member.get("type") == "custom_tool_call"
        arguments = member.get("input" if is_custom else "arguments")
        return (ShownToolCall(member.get("call_id"), member.get("name"), arguments),)

    def _results_in(self, member: dict[str, Any], calls: Calls) -> Iterable[ToolResult]:
        if member.get("type") not in RESULT_TYPES:
            return ()
        return tool_result(member.get("call_id"), member.get("output"), calls)


# Settings that vLLM accepts for responses but ignores; another server may apply them.
IGNORED_BY_VLLM: Final = ("min_tokens", "bad_words", "allowed_token_ids")


class ResponsesSampling(SamplingRules):
    settings = frozenset({"max_output_tokens", "text"})
    objects = ("text",)
    harmless = HARMLESS_FIELDS | {
        *("input", "instructions", "previous_response_id", "conversation", "prompt", "store"),
        *("background", "include", "max_tool_calls", "reasoning", "service_tier", "truncation"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "moderation"),
        *("safety_identifier", "top_logprobs", "context_management", "access_programs"),
        *("enable_response_messages", "previous_input_messages", "image"),
    }

    def prevents_replay(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a setting is present that some servers ignore."""
        return any(settings.get(name) for name in IGNORED_BY_VLLM)

    def constrains(self, settings: Mapping[str, Any]) -> bool:
        return super().constrains(settings) or not has_free_form(settings.get("text"))

    def grammar(self, fields: Mapping[str, Any], tag: str | None) -> Mapping[str, str] | None:
        text, choice, tools = fields.get("text"), fields.get("tool_choice"), fields.get("tools")
        form = text.get("format") if isinstance(text, dict) else None
        forced = None if is_free_choice(choice) else forced_call(choice, choice)
        listed = tools if isinstance(tools, list) else []
        plain = all(isinstance(tool, dict) and tool.get("type") == "function" for tool in listed)
        functions = functions_if_well_formed(listed) if plain else None
        return grammar_of(fields, form, forced, functions, tag, flat=True)


IDS: Final = "enable_response_messages"
INCLUDE: Final = "include"
TOP_LOGPROBS: Final = "top_logprobs"
LOGPROBS: Final = "message.output_text.logprobs"

# Items that one sample can give. With any other, the server ran several turns by itself.
_SAMPLED_ITEMS: Final = frozenset({"message", "reasoning", "function_call", "custom_tool_call"})
_THOUGHT: Final = "reasoning"
# If false, vLLM leaves thoughts out of the reply.
_SHOWS_THOUGHTS: Final = "include_reasoning"
# vLLM's type of messages with token ids; messages in gpt-oss's own form have no ids.
_RAW_TOKENS: Final = "raw_message_tokens"
_LAST_EVENTS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_TEXT_DELTA: Final = "response.output_text.delta"
_EMPTY: Final = msgspec.Raw(b"[]")
_NOT_REQUESTED: Final = (NULL, _EMPTY)


class ResponsesReply(ReplyParser):
    """Parser of a response in one piece, or of a stream whose first and last events hold it.

    A reply without the API's shape keeps its form: members that only Pawl asked for are removed at
    any depth, and the client's name for the model is put back.
    """

    def begin(self) -> None:
        self._hide_ids = IDS in self._request.injected
        self._hide_logprobs = INCLUDE in self._request.injected
        self._changes_nothing = not (self._hide_ids or self._hide_logprobs or self._model)
        # The newest response, as the client sees it.
        self._response: dict[str, Any] | None = None
        self._deltas: list[str] = []
        self._prompts: list[list[int]] | None = None
        self._ids: list[list[int]] | None = None
        self._logprobs: list[float] = []
        self._one_sample = True
        self._may_have_thoughts = self._request.fields.get(_SHOWS_THOUGHTS) not in (None, True)

    def client_reply(self, body: bytes) -> bytes:
        """Return the client's reply; `body` itself if nothing had to be removed or replaced."""
        out = self._without_added(body)
        self._response = decoded_object(out)
        return out

    def _without_added(self, body: bytes) -> bytes:
        parsed = parse_object(body)
        if parsed is None or parsed.keys().isdisjoint(("model", "output")):
            return self.hide_added_members(body)
        try:
            self._hide_in_response(parsed)
        except ODD_SHAPE:
            return self.hide_added_members(body)
        return body if self._changes_nothing else msgspec.json.encode(parsed)

    def client_event(self, data: bytes) -> bytes:
        event = parse_object(data)
        if event is None:
            raise UnreadableEvent
        try:
            changed = self._hide_in_event(event)
        except ODD_SHAPE:
            self._unreadable_events += 1
            return self.hide_added_members(data)
        return msgspec.json.encode(event) if changed and not self._changes_nothing else data

    def is_end(self, line: bytes) -> bool:
        """Return whether a line names the event that ends a response."""
        if not line.startswith(EVENT):
            return False
        return line[len(EVENT) :].strip().decode(errors="replace") in _LAST_EVENTS

    def added_members(self, data: bytes) -> dict[bytes, Replacement]:
        """Return, by name, how to hide added members of a response or a text delta."""
        members: dict[bytes, Replacement] = {}
        if self._hide_ids:
            members |= dict.fromkeys(
                (b"input_messages", b"output_messages"), Replacement(opens=ARRAY)
            )
        if self._hide_logprobs:
            instead = bytes(_EMPTY if _TEXT_DELTA.encode() in data else NULL)
            members[TOP_LOGPROBS.encode()] = Replacement(opens=NUMBER)
            members[b"logprobs"] = Replacement(opens=ARRAY, instead=instead, unless_empty=True)
        return members

    def summary(self) -> ReplySummary:
        """Return the reply's id and text so far, and its tool calls once its last event came."""
        response = self._response or {}
        return ReplySummary(
            response_id=string_or_none(response.get("id")),
            text="".join(self._deltas) if self._streamed else _text_of(response),
            tool_calls=_tool_calls_of(response),
        )

    def facts(self) -> ReplyFacts:
        """Return the facts of the response, in a stream from the newest event that holds it."""
        response = self._response
        if response is None:
            return ReplyFacts(None, None, None, None, (), self._sampled(None))
        usage = response.get("usage") if isinstance(response.get("usage"), dict) else None
        return ReplyFacts(
            reply=msgspec.json.encode(response),
            response_id=string_or_none(response.get("id")),
            finish=string_or_none(response.get("status")),
            usage=usage,
            tool_calls=_tool_calls_of(response),
            sampled=self._sampled(usage),
            text=_text_of(response),
        )

    def _sampled(self, usage: dict[str, Any] | None) -> SampledTokens:
        """Return the token data, with ids only if there was one prompt and one sample.

        vLLM gives log-probabilities of texts only. Unless they are as many as the ids, they are
        dropped: they cannot be assigned to tokens.
        """
        prompts, replies = self._prompts or [], self._ids or []
        exact = self._one_sample and len(prompts) == 1
        ids = tuple(replies[0]) if exact and len(replies) == 1 else None
        complete = ids is not None and len(self._logprobs) == len(ids)
        details = (usage or {}).get("output_tokens_details")
        thoughts = details.get("reasoning_tokens") if isinstance(details, dict) else None
        return SampledTokens(
            prompt_ids=tuple(prompts[0]) if exact else None,
            sampled_ids=ids,
            sampled_logprobs=tuple(self._logprobs) if complete else None,
            choices=1,
            completion_tokens=(usage or {}).get("output_tokens"),
            thoughtless=not self._may_have_thoughts and thoughts == 0,
        )

    def _hide_in_event(self, event: Object) -> bool:
        """Remove added values from an event, in place; return whether its type can have any."""
        kind = value_of(event.get("type"))
        if "response" in event:
            response = msgspec.json.decode(event["response"], type=Object)
            self._hide_in_response(response)
            event["response"] = msgspec.Raw(msgspec.json.encode(response))
            self._response = decoded_object(event["response"])
        elif kind == _TEXT_DELTA:
            self._deltas.append(msgspec.json.decode(event["delta"], type=str))
            self.gathered += len(self._deltas[-1]) + PIECE_BYTES
            self._hide_in_text(event, _EMPTY)
        elif kind == "response.content_part.done":
            part = msgspec.json.decode(event["part"], type=Object)
            self._hide_in_text(part, NULL)
            event["part"] = msgspec.Raw(msgspec.json.encode(part))
        elif kind == "response.output_item.done":
            item = msgspec.json.decode(event["item"], type=Object)
            self._hide_in_item(item)
            event["item"] = msgspec.Raw(msgspec.json.encode(item))
        else:
            return False
        return True

    def _hide_in_response(self, response: Object) -> None:
        """Remove added values from a response, in place; keep its token data, the newest."""
        if self._model is not None and "model" in response:
            response["model"] = self._model
        self._prompts = _token_ids(response.get("input_messages"))
        self._ids = _token_ids(response.get("output_messages"))
        for name in ("input_messages", "output_messages"):
            if self._hide_ids and name in response:
                response[name] = NULL
        if self._hide_logprobs and TOP_LOGPROBS in response:
            response[TOP_LOGPROBS] = NULL
        self._logprobs = []
        items = _objects_of(response.get("output"))
        if items:
            for item in items:
                kind = value_of(item.get("type"))
                self._one_sample &= kind in _SAMPLED_ITEMS
                self._may_have_thoughts |= kind == _THOUGHT
                self._logprobs += self._hide_in_item(item)
            response["output"] = msgspec.Raw(msgspec.json.encode(items))

    def _hide_in_item(self, item: Object) -> list[float]:
        """Remove added values from an output item, in place; return its log-probabilities."""
        logprobs: list[float] = []
        parts = _objects_of(item.get("content"))
        if parts:
            for part in parts:
                logprobs += self._hide_in_text(part, NULL)
            item["content"] = msgspec.Raw(msgspec.json.encode(parts))
        return logprobs

    def _hide_in_text(self, holder: Object, placeholder: msgspec.Raw) -> list[float]:
        """Remove added values from a text or a piece of it, in place; return its log-probabilities.

        `placeholder` is the value that vLLM gives `logprobs` if they are not requested.
        """
        logprobs = holder.get("logprobs")
        if logprobs is None or logprobs in _NOT_REQUESTED:
            return []
        if self._hide_logprobs:
            holder["logprobs"] = placeholder
        return [token.logprob for token in msgspec.json.decode(logprobs, type=list[TokenLogprob])]


class _RawMessage(msgspec.Struct):
    type: str
    tokens: list[TokenId] | None = None


def _token_ids(raw: msgspec.Raw | None) -> list[list[int]] | None:
    """Return the token ids of each message, or None if a message has none."""
    if raw is None or raw in _NOT_REQUESTED:
        return None
    messages = msgspec.json.decode(raw, type=list[_RawMessage])
    if any(message.type != _RAW_TOKENS or message.tokens is None for message in messages):
        return None
    return [message.tokens or [] for message in messages]


def _objects_of(raw: msgspec.Raw | None) -> list[Object]:
    """Return a list's objects with values unparsed; nothing if the value is not a list."""
    if raw is None or memoryview(raw)[0] not in ARRAY:
        return []
    return msgspec.json.decode(raw, type=list[Object])


def _text_of(response: dict[str, Any]) -> str:
    """Return the texts of a response's messages, concatenated."""
    messages = blocks_of(response.get("output"), "message")
    parts = (part for item in messages for part in blocks_of(item.get("content"), "output_text"))
    return "".join(string_or_none(part.get("text")) or "" for part in parts)


def _tool_calls_of(response: dict[str, Any]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            id=str(item.get("call_id")),
            name=str(item.get("name")),
            arguments=str(item.get("arguments")),
        )
        for item in blocks_of(response.get("output"), "function_call")
    )


class ResponsesFormat(WireFormat):
    name = "responses"
    title = "OpenAI responses"
    path = "/v1/responses"
    errors = ResponsesErrors()
    turns = ResponsesTurns()
    sampling = ResponsesSampling()
    parser = ResponsesReply

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Return the request with `served_name` as its model and, if wanted, fields that give ids.

        No fields are added to a background request, which is answered before anything is sampled.
        """
        fields = request.fields
        included = fields.get(INCLUDE)
        added: Object = {}
        if want_ids and isinstance(included, list | None) and fields.get("background") is not True:
            if fields.get(IDS) is None or fields[IDS] is False:
                added[IDS] = msgspec.Raw(b"true")
            if LOGPROBS not in (included or ()):
                added[INCLUDE] = msgspec.Raw(msgspec.json.encode([*(included or ()), LOGPROBS]))
                # Without `include` the number of alternatives is ignored; with it, too large a
                # number would fail the call.
                if isinstance(fields.get(TOP_LOGPROBS), int) and fields[TOP_LOGPROBS] > 0:
                    added[TOP_LOGPROBS] = msgspec.Raw(b"0")
        return with_changes(request, served_name, added)


RESPONSES: Final = ResponsesFormat()
