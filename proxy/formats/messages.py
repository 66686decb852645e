"""Wire format of `/v1/messages`, answered by chat completions if vLLM serves the model (pure).

vLLM returns ids with chat completions but not with messages, which it translates to chat
completions anyway. So the request is sent as a chat completion, and the reply is turned into a
message. A request is forwarded as it is if chat completions cannot express it, if another server
serves the model, or if chat completions refuse it as malformed: the API's own error then results.

A system message may stand between turns. Many chat templates refuse it there, drop it, or move it
to the front, so that each new system message changes the whole prompt. For such templates it is
merged into the preceding turn (docs/decisions/009-messages-and-responses.md).
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from proxy.formats.base import ModelRequest, ReplyParser, WireFormat, with_changes
from proxy.formats.chat import CHAT, grammar_of_chat
from proxy.formats.conversation import (
    SYSTEM_ROLES,
    Calls,
    Conversation,
    ShownToolCall,
    ToolResult,
    Turns,
    blocks_of,
    is_only_text,
    tool_result,
)
from proxy.formats.errors import ANTHROPIC
from proxy.formats.message_replies import ForwardedReply, TranslatedReply
from proxy.formats.raw_json import Object
from proxy.formats.sampling import (
    HARMLESS_FIELDS,
    SamplingRules,
    has_free_form,
    limits_thinking,
)

Fields = Mapping[str, Any]
Message = dict[str, Any]
Value = TypeVar("Value")

# Fields that vLLM ignores and that chat completions do not have. The SDK's tool runner adds
# `thread`.
IGNORED_FIELDS: Final = frozenset(
    {
        *("metadata", "service_tier", "context_management", "inference_geo", "cache_control"),
        "thread",
    }
)
# Fields that both APIs have under one name, vLLM's additions included.
SHARED_FIELDS: Final = (
    *("model", "max_tokens", "temperature", "top_p", "top_k"),
    *("cache_salt", "watermarking", "vllm_xargs", "chat_template_kwargs"),
)
TRANSLATED_FIELDS: Final = frozenset(
    {
        *("messages", "system", "tools", "tool_choice", "stop_sequences"),
        *("stream", "thinking", "output_config"),
    }
)
KNOWN_FIELDS: Final = IGNORED_FIELDS | TRANSLATED_FIELDS | frozenset(SHARED_FIELDS)
# Claude Code's first system block: it has a hash that changes with each request, and vLLM leaves
# it out of the prompt.
BILLING_PREFIX: Final = "x-anthropic-billing-header"
# Claude Code's markup of system text within a turn.
REMINDER: Final = "<system-reminder>\n{}\n</system-reminder>"
# System message blocks that add or remove tools.
TOOL_CHANGES: Final = ("tool_addition", "tool_removal")
TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
# Anthropic's smallest thinking budget, in tokens.
MIN_THINKING_TOKENS: Final = 1024


class Inexpressible(Exception):
    """Raised for a part of a request that chat completions cannot express."""


def chat_request(fields: Fields, *, keep_system: bool = False) -> dict[str, Any] | None:
    """Return the chat request that vLLM would make of `fields`, or None if inexpressible.

    With `keep_system`, system messages stay between the turns of a conversation that begins with a
    system message; otherwise they are merged into the preceding turns.
    """
    try:
        return _chat_request(fields, keep_system=keep_system)
    except Inexpressible:
        return None


def _chat_request(fields: Fields, *, keep_system: bool) -> dict[str, Any]:
    if not KNOWN_FIELDS.issuperset(fields):
        raise Inexpressible
    _expect(isinstance(fields.get("model"), str))
    max_tokens = _expect_count(fields.get("max_tokens"), 1)
    request = {name: fields[name] for name in SHARED_FIELDS if fields.get(name) is not None}
    system = _system(_blocks_or_text(fields.get("system"), "text"))
    request["messages"] = _messages(fields.get("messages"), system, keep_system=keep_system)
    if fields.get("stop_sequences") is not None:
        request["stop"] = fields["stop_sequences"]
    if fields.get("stream") is True:
        usage = {"include_usage": True, "continuous_usage_stats": True}
        request |= {"stream": True, "stream_options": usage}
    else:
        _expect(fields.get("stream") in (None, False))
    request |= _output_format(fields.get("output_config"))
    request |= _thinking(fields.get("thinking"), max_tokens)
    return request | _tools(tools_in_effect(fields), fields.get("tool_choice"))


def _expect(condition: bool) -> None:
    if not condition:
        raise Inexpressible


def _expect_count(value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise Inexpressible
    return value


def _expect_type(value: object, kind: type[Value]) -> Value:
    if not isinstance(value, kind):
        raise Inexpressible
    return value


def _expect_fields(value: object, *known: str) -> Message:
    """Return `value` if it is an object without fields beside `known`, else raise Inexpressible."""
    fields = _expect_type(value, dict)
    _expect(set(known).issuperset(fields))
    return fields


def _blocks_or_text(value: object, *kinds: str) -> str | list[dict[str, Any]]:
    return value if isinstance(value, str) else _blocks([] if value is None else value, *kinds)


def _system(content: str | list[dict[str, Any]]) -> list[Message]:
    """Return a list with the system message, or an empty list if `content` has no text."""
    if not isinstance(content, str):
        texts = [block["text"] for block in content if block["type"] == "text"]
        content = "".join(text for text in texts if not text.startswith(BILLING_PREFIX))
    return [{"role": "system", "content": content}] if content else []


def _blocks(value: object, *kinds: str) -> list[dict[str, Any]]:
    """Return content blocks; raise Inexpressible if one is malformed or not of `kinds`."""
    blocks = [_expect_type(block, dict) for block in _expect_type(value, list)]
    for block in blocks:
        _expect(block.get("type") in kinds)
        _expect(block["type"] != "text" or isinstance(block.get("text"), str))
    return blocks


def _messages(value: object, system: list[Message], *, keep_system: bool) -> list[Message]:
    messages = [*system]
    for message in _expect_type(value, list):
        role, content = (
            _expect_fields(message, "role", "content").get("role"),
            message.get("content"),
        )
        if role == "system":
            if not (isinstance(content, str) and content.startswith(BILLING_PREFIX)):
                inline = _system(_blocks_or_text(content, "text", *TOOL_CHANGES))
                if not messages or (keep_system and messages[0]["role"] == "system"):
                    messages += inline
                else:
                    _merge_system_message(messages, inline)
        elif isinstance(content, str) and role in ("user", "assistant"):
            messages.append({"role": role, "content": content})
        elif role == "user":
            messages += _user(content)
        elif role == "assistant":
            messages.append(_assistant(content))
        else:
            raise Inexpressible
    return messages


def _merge_system_message(messages: list[Message], inline: list[Message]) -> None:
    """Merge a system message into the preceding turn, or into the system prompt before all turns.

    The system message becomes a user turn only after an assistant turn. After other turns, a user
    turn would end the assistant's turn, and many templates keep thoughts only until then; some
    templates also refuse two user turns in a row.
    """
    last = messages[-1]
    for text in (message["content"] for message in inline):
        if last["role"] == "system":
            last["content"] += f"\n\n{text}"
        elif last["role"] == "assistant":
            messages.append({"role": "user", "content": REMINDER.format(text)})
        elif isinstance(last["content"], str):
            last["content"] += f"\n\n{REMINDER.format(text)}"
        else:
            last["content"].append({"type": "text", "text": REMINDER.format(text)})


def _user(content: object) -> list[Message]:
    """Return the chat messages for a user's content: tool results, then the other parts."""
    results: list[Message] = []
    parts: list[Message] = []
    for block in _blocks(content, "text", "image", "tool_result"):
        if block["type"] == "tool_result":
            results += _tool_result(block)
        else:
            parts += _part(block)
    message_content = _content(parts)
    return (
        results
        if message_content is None
        else [*results, {"role": "user", "content": message_content}]
    )


def _assistant(content: object) -> Message:
    message: Message = {"role": "assistant"}
    thoughts: list[str] = []
    calls: list[Message] = []
    parts: list[Message] = []
    for block in _blocks(content, "text", "image", "thinking", "redacted_thinking", "tool_use"):
        if block["type"] == "thinking":
            thoughts.append(_expect_type(block.get("thinking"), str))
        elif block["type"] == "tool_use":
            calls.append(_tool_call(block))
        elif block["type"] != "redacted_thinking":
            parts += _part(block)
    message_content = _content(parts)
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message if message_content is None else message | {"content": message_content}


def _part(block: dict[str, Any]) -> list[Message]:
    if block["type"] == "image":
        return [_image(block)]
    return [{"type": "text", "text": block["text"]}] if block["text"] else []


def _content(parts: list[Message]) -> str | list[Message] | None:
    if len(parts) == 1 and parts[0]["type"] == "text":
        return _expect_type(parts[0]["text"], str)
    return parts or None


def _image(block: dict[str, Any]) -> Message:
    source = _expect_type(block.get("source"), dict)
    if source.get("type") == "url":
        url = _expect_type(source.get("url"), str)
    else:
        _expect(source.get("type") == "base64")
        media_type = _expect_type(source.get("media_type"), str)
        url = f"data:{media_type};base64,{_expect_type(source.get('data'), str)}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_call(block: dict[str, Any]) -> Message:
    arguments = _expect_type(block.get("input") or {}, dict)
    function = {"name": _expect_type(block.get("name"), str), "arguments": json.dumps(arguments)}
    return {"id": _expect_type(block.get("id"), str), "type": "function", "function": function}


def _tool_result(block: dict[str, Any]) -> list[Message]:
    """Return a tool message, and a user message with its images: tool messages have none."""
    content = block.get("content")
    texts: list[str] = []
    images: list[Message] = []
    if isinstance(content, str):
        texts.append(content)
    elif content is not None:
        for part in _blocks(content, "text", "image"):
            if part["type"] == "text":
                texts.append(part["text"])
            else:
                images.append(_image(part))
    tool: Message = {"role": "tool", "tool_call_id": _expect_type(block.get("tool_use_id"), str)}
    tool["content"] = "\n".join(texts)
    return [tool, {"role": "user", "content": images}] if images else [tool]


def _output_format(value: object) -> Message:
    if value is None:
        return {}
    config = _expect_fields(value, "effort", "format")
    settings: Message = {}
    if config.get("format") is not None:
        form = _expect_fields(config["format"], "type", "schema")
        _expect(form.get("type") == "json_schema")
        schema = {"name": "json_schema", "schema": _expect_type(form.get("schema"), dict)}
        settings["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config.get("effort") is not None:
        _expect(config["effort"] in EFFORTS)
        settings["reasoning_effort"] = config["effort"]
    return settings


def _thinking(value: object, max_tokens: int) -> Message:
    if value is None:
        return {}
    config = _expect_fields(value, "type", "budget_tokens", "display")
    match config.get("type"):
        case "disabled":
            return {"reasoning_effort": "none"}
        case "adaptive":
            return {}
        case "enabled":
            budget = _expect_count(config.get("budget_tokens"), MIN_THINKING_TOKENS)
            _expect(budget < max_tokens)
            return {"thinking_token_budget": budget}
    raise Inexpressible


def tools_in_effect(fields: Fields) -> object:
    """Return a request's tools after all changes by its system messages, in Anthropic's form.

    A chat request has a single list of tools: as in vLLM, those at the conversation's end.

    Raises:
        Inexpressible: a tool or a change cannot be read, or a change names an undeclared tool.
    """
    changes = [
        block
        for message in _system_messages(fields)
        if isinstance(message.get("content"), list)
        for block in message["content"]
        if isinstance(block, dict) and block.get("type") in TOOL_CHANGES
    ]
    if not changes:
        return fields.get("tools")
    tools = [_expect_type(tool, dict) for tool in _expect_type(fields.get("tools") or [], list)]
    declared = {_expect_type(tool.get("name"), str): tool for tool in tools}
    removed = set()
    for block in changes:
        change, adds = _expect_type(block.get("tool"), dict), block["type"] == "tool_addition"
        if adds and change.get("type") == "tool_definition":
            tool = _expect_type(change.get("definition"), dict)
            name = _expect_type(tool.get("name"), str)
        else:
            _expect(change.get("type") == "tool_reference")
            name = _expect_type(change.get("name"), str)
            _expect(name in declared)
            tool = {n: part for n, part in declared[name].items() if n != "defer_loading"}
        if adds:
            declared[name] = tool
            removed.discard(name)
        else:
            removed.add(name)
    return [tool for name, tool in declared.items() if name not in removed]


def _system_messages(fields: Fields) -> list[dict[str, Any]]:
    """Return a request's system messages; malformed messages are skipped."""
    messages = fields.get("messages")
    return [
        message
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and message.get("role") == "system"
    ]


def _tools(tools: object, choice: object) -> Message:
    settings: Message = {}
    if not tools:
        # Chat completions refuse a tool choice without tools; leaving it out gives the same prompt.
        _expect(_tool_choice(_expect_type(choice or {"type": "none"}, dict)) in ("auto", "none"))
        return settings
    if choice is not None:
        chosen = _expect_fields(choice, "type", "name", "disable_parallel_tool_use")
        settings["tool_choice"] = _tool_choice(chosen)
        settings["parallel_tool_calls"] = not chosen.get("disable_parallel_tool_use")
    settings.setdefault("tool_choice", "auto")
    return settings | {"tools": [_tool(tool) for tool in _expect_type(tools, list)]}


def _tool_choice(choice: dict[str, Any]) -> str | Message:
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": _expect_type(choice.get("name"), str)}}
    kind = _expect_type(choice.get("type"), str)
    _expect(kind in TOOL_CHOICES)
    return TOOL_CHOICES[kind]


def _tool(value: object) -> Message:
    """Return a client-side tool in chat's form; raise Inexpressible for server-side tools."""
    tool = _expect_type(value, dict)
    _expect(tool.get("type") in (None, "custom"))
    schema = _expect_type(tool.get("input_schema"), dict)
    function = {
        "name": _expect_type(tool.get("name"), str),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else schema | {"type": "object"},
    }
    flags = {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
    return {"type": "function", "function": function | flags}


class MessagesTurns(Turns):
    field = "messages"
    instructions = "system"
    states_errors = True

    def only_text(self, parsed: Object) -> bool:
        """Return whether the system prompt and the messages are all text."""
        return is_only_text(parsed.get("system")) and super().only_text(parsed)

    def _add(self, conversation: Conversation, member: dict[str, Any]) -> None:
        role, content = member.get("role"), member.get("content")
        if role == "assistant":
            conversation.add_assistant(content)
            conversation.add_tool_use_blocks(content)
        elif isinstance(role, str) and role not in SYSTEM_ROLES:
            conversation.add_user_turn(content)

    def _tool_calls(self, member: dict[str, Any]) -> Iterable[ShownToolCall]:
        for block in blocks_of(member.get("content"), "tool_use"):
            yield ShownToolCall(block.get("id"), block.get("name"), block.get("input"))

    def _results_in(self, member: dict[str, Any], calls: Calls) -> Iterable[ToolResult]:
        for block in blocks_of(member.get("content"), "tool_result"):
            stated = block.get("is_error")
            yield from tool_result(
                block.get("tool_use_id"),
                block.get("content"),
                calls,
                stated if isinstance(stated, bool) else None,
            )


class MessagesSampling(SamplingRules):
    settings = frozenset({"stop_sequences", "output_config", "thinking"})
    objects = ("output_config", "thinking")
    harmless = HARMLESS_FIELDS | {
        *("messages", "system", "service_tier", "inference_geo", "cache_control", "container"),
        *("context_management", "compaction", "mcp_servers", "betas", "diagnostics"),
        *("user_profile_id", "workspace_id", "speed", "billing_policy", "thread"),
    }

    def prevents_replay(self, settings: Fields) -> bool:
        return limits_thinking(settings)

    def constrains(self, settings: Fields) -> bool:
        return super().constrains(settings) or not has_free_form(settings.get("output_config"))

    def tools(self, fields: Fields) -> Any:
        """Return the tools after all changes, or the declared tools if a change is unreadable."""
        try:
            return tools_in_effect(fields)
        except Inexpressible:
            return super().tools(fields)

    def grammar(self, fields: Fields, tag: str | None) -> Mapping[str, str] | None:
        """Return the grammar of the equivalent chat request."""
        as_chat = chat_request(fields)
        return None if as_chat is None else grammar_of_chat(as_chat, tag)


TOKEN_DATA_FIELDS: Final = {"logprobs": True, "return_token_ids": True}


class MessagesFormat(WireFormat):
    """Anthropic's API, served by chat completions if token ids are wanted."""

    name = "messages"
    title = "Anthropic messages"
    path = "/v1/messages"
    forwarded = ("/v1/messages/count_tokens",)
    errors = ANTHROPIC
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    turns = MessagesTurns()
    sampling = MessagesSampling()

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Return the equivalent chat request if ids are wanted and it exists, else `request`.

        Its model is `served_name`, unless that is None.
        """
        fields, keep_system = request.fields, request.keep_system
        chat = chat_request(fields, keep_system=keep_system) if want_ids else None
        if chat is None:
            return with_changes(request, served_name, {})
        if served_name is not None:
            chat["model"] = served_name
        return msgspec.structs.replace(
            request,
            body=msgspec.json.encode(chat | TOKEN_DATA_FIELDS),
            injected=frozenset(TOKEN_DATA_FIELDS),
            path=CHAT.path,
        )

    def has_inline_system(self, request: ModelRequest) -> bool:
        return bool(_system_messages(request.fields))

    def parser_for(self, request: ModelRequest) -> type[ReplyParser]:
        """Return `TranslatedReply` for a translated request, else `ForwardedReply`."""
        return ForwardedReply if request.path is None else TranslatedReply


MESSAGES: Final = MessagesFormat()
