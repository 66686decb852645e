"""Wire format of `/v1/chat/completions` (pure)."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from proxy.formats.choices import IDS, LOGPROBS, ChoicesFormat, ChoicesReply
from proxy.formats.conversation import (
    SYSTEM_ROLES,
    TOOL_ROLES,
    Calls,
    Conversation,
    ShownToolCall,
    ToolResult,
    Turns,
    objects,
    tool_result,
)
from proxy.formats.raw_json import NULL, Object, readable_value
from proxy.formats.sampling import (
    HARMLESS_FIELDS,
    SamplingRules,
    forced_call,
    functions_if_well_formed,
    grammar_of,
    is_free_choice,
    is_free_form,
    limits_thinking,
)

# Values of `modalities` that request text alone.
TEXT_ALONE: Final[tuple[object, ...]] = (None, [], ["text"])


class ChatTurns(Turns):
    field = "messages"

    def only_text(self, parsed: Object) -> bool:
        """Return whether the messages are all text, and only text is requested."""
        modalities = parsed.get("modalities")
        wants_text = modalities is None or readable_value(modalities) in TEXT_ALONE
        return wants_text and super().only_text(parsed)

    def _is_text(self, member: Object) -> bool:
        """Return whether a message is all text and does not refer to audio of an earlier reply."""
        return member.get("audio", NULL) == NULL and super()._is_text(member)

    def _add(self, conversation: Conversation, member: dict[str, Any]) -> None:
        role = member.get("role")
        if role == "assistant":
            conversation.add_assistant(member.get("content"))
            for call in objects(member.get("tool_calls")):
                function = call.get("function")
                function = function if isinstance(function, dict) else {}
                conversation.add_tool_call(
                    call.get("id"), function.get("name"), function.get("arguments")
                )
            conversation.add_tool_use_blocks(member.get("content"))
        elif role in TOOL_ROLES:
            conversation.add_tool_result(member.get("tool_call_id"), member.get("content"))
        elif isinstance(role, str) and role not in SYSTEM_ROLES:
            conversation.add_user_turn(member.get("content"))

    def _tool_calls(self, member: dict[str, Any]) -> Iterable[ShownToolCall]:
        for call in objects(member.get("tool_calls")):
            is_custom = call.get("type") == "custom"
            of_kind = call.get("custom" if is_custom else "function")
            given = of_kind if isinstance(of_kind, dict) else {}
            arguments = given.get("input" if is_custom else "arguments")
            yield ShownToolCall(call.get("id"), given.get("name"), arguments)

    def _results_in(self, member: dict[str, Any], calls: Calls) -> Iterable[ToolResult]:
        if member.get("role") != "tool":
            return ()
        return tool_result(member.get("tool_call_id"), member.get("content"), calls)


class ChatSampling(SamplingRules):
    """Sampling rules of chat completions, with `thinking`, which litellm passes to Anthropic."""

    settings = frozenset({"max_completion_tokens", "response_format", "thinking", "function_call"})
    objects = ("thinking",)
    harmless = HARMLESS_FIELDS | {
        *("messages", "logprobs", "top_logprobs", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "moderation"),
        *("reasoning_effort", "reasoning", "verbosity", "modalities", "audio", "prediction"),
        *("web_search_options", "add_generation_prompt", "continue_final_message", "echo"),
        *("return_prompt_text", "functions"),
    }

    def prevents_replay(self, settings: Mapping[str, Any]) -> bool:
        return limits_thinking(settings)

    def constrains(self, settings: Mapping[str, Any]) -> bool:
        if not is_free_choice(settings.get("function_call")):
            return True
        return super().constrains(settings) or not is_free_form(settings.get("response_format"))

    def grammar(self, fields: Mapping[str, Any], tag: str | None) -> Mapping[str, str] | None:
        return grammar_of_chat(fields, tag) if is_free_choice(fields.get("function_call")) else None


def grammar_of_chat(fields: Mapping[str, Any], tag: str | None) -> Mapping[str, str] | None:
    """Return the grammar of a chat request, or None if it has none or it cannot be read."""
    choice, forced = fields.get("tool_choice"), None
    if not is_free_choice(choice):
        forced = forced_call(choice, choice.get("function") if isinstance(choice, dict) else None)
    tools = fields.get("tools")
    functions = [
        tool.get("function")
        if isinstance(tool, dict) and tool.get("type", "function") == "function"
        else None
        for tool in (tools if isinstance(tools, list) else [])
    ]
    return grammar_of(
        fields, fields.get("response_format"), forced, functions_if_well_formed(functions), tag
    )


class ChatReply(ChoicesReply):
    reply_object = "chat.completion"


class ChatFormat(ChoicesFormat):
    name = "chat"
    title = "OpenAI chat completions"
    path = "/v1/chat/completions"
    unneeded_fields = ("messages",)
    turns = ChatTurns()
    sampling = ChatSampling()
    parser = ChatReply
    token_data_fields: Mapping[str, msgspec.Raw] = {
        LOGPROBS: msgspec.Raw(b"true"),
        IDS: msgspec.Raw(b"true"),
    }
    # vLLM refuses these two without the client's own `logprobs`.
    blocking_fields = ("top_logprobs", "logprob_token_ids")
    unblocking_field = LOGPROBS


CHAT: Final = ChatFormat()
