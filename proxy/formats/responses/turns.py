"""Read the turns of a response's input: messages and items of other types, side by side (pure)."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from proxy.formats.base import Object, ToolResult
from proxy.formats.conversation import Conversation
from proxy.formats.requests import NULL, readable_value
from proxy.formats.turns import (
    TOOL_ROLES,
    UNHEARD_ROLES,
    BaseTurns,
    Calls,
    Named,
    is_only_text,
    is_text,
    tool_result,
)

QUOTE: Final = b'"'
PREVIOUS: Final = "previous_response_id"
# With either of these the server keeps the conversation, and a request shows only what is new.
KEPT_BY_SERVER: Final = (PREVIOUS, "conversation")
RESULT_TYPES: Final = ("function_call_output", "custom_tool_call_output")
# The type of an item that the client adds, beside messages, ends so.
HEARD_SUFFIXES: Final = ("_output", "_response")
# Items without a role that are text; one of another type may be anything (a screen, a picture).
TEXT_ITEMS: Final = frozenset(
    {
        *("message", "reasoning", "function_call", "custom_tool_call", *RESULT_TYPES),
        *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("web_search_call", "file_search_call", "compaction"),
    }
)


class ResponsesTurns(BaseTurns):
    """Read a response's input, which may go on from an earlier one that the server keeps."""

    field = "input"
    continued_by_id = True

    def continues(self, fields: Mapping[str, Any]) -> str | None:
        """Return the id of the response that a request goes on from, if it names one."""
        previous = fields.get(PREVIOUS)
        return previous if isinstance(previous, str) and previous else None

    def shows_all(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a request shows its conversation from the beginning."""
        return not any(fields.get(name) for name in KEPT_BY_SERVER)

    def read(self, fields: Mapping[str, Any]) -> Conversation:
        """Return the conversation that a request shows; its input may be one text."""
        given = fields.get(self.field)
        if not isinstance(given, str):
            return super().read(fields)
        conversation = Conversation()
        conversation.heard(b"u", given.encode(errors="surrogatepass"))
        return conversation

    def said_by_users(self, parsed: Object) -> Iterable[msgspec.Raw]:
        """Return what users say, message by message; an input that is one text is a user's."""
        given = parsed.get(self.field, NULL)
        is_one_text = memoryview(given)[0] in QUOTE
        return [given] if is_one_text else super().said_by_users(parsed)

    def only_text(self, parsed: Object) -> bool:
        """Return whether the input is all text, as far as the request shows it.

        So must be what is filled into a prompt that the server keeps.
        """
        prompt = readable_value(parsed.get("prompt", NULL))
        filled = prompt.get("variables") if isinstance(prompt, dict) else None
        values = filled.values() if isinstance(filled, dict) else ()
        return all(map(is_text, values)) and super().only_text(parsed)

    def _is_text(self, member: Object) -> bool:
        """Return whether an item is text, with all of its content or of a tool's output."""
        kind = readable_value(member.get("type", NULL))
        known = "role" in member or (isinstance(kind, str) and kind in TEXT_ITEMS)
        return known and is_only_text(member.get("output")) and super()._is_text(member)

    def _add(self, conversation: Conversation, member: dict[str, Any]) -> None:
        kind, role = member.get("type"), member.get("role")
        if role == "assistant":
            conversation.said(member.get("content"))
        elif role in TOOL_ROLES:
            conversation.result(member.get("tool_call_id"), member.get("content"))
        elif isinstance(role, str):
            if role not in UNHEARD_ROLES:
                conversation.asked(member.get("content"))
        elif kind == "function_call":
            conversation.called(member.get("call_id"), member.get("name"), member.get("arguments"))
        elif isinstance(kind, str) and kind.endswith("_output"):
            conversation.result(member.get("call_id"), member.get("output"))

    def _is_assistants(self, member: dict[str, Any]) -> bool:
        """Return whether a member is the model's: a message of its role, or an item of another.

        Items of the model's have no role, and the client's own end in one of `HEARD_SUFFIXES`.
        """
        role, kind = member.get("role"), member.get("type")
        if isinstance(role, str):
            return role == "assistant"
        return isinstance(kind, str) and not kind.endswith(HEARD_SUFFIXES)

    def _called(self, member: dict[str, Any]) -> Iterable[Named]:
        is_custom = member.get("type") == "custom_tool_call"
        arguments = member.get("input" if is_custom else "arguments")
        return ((member.get("call_id"), member.get("name"), arguments),)

    def _results_in(self, member: dict[str, Any], calls: Calls) -> Iterable[ToolResult]:
        if member.get("type") not in RESULT_TYPES:
            return ()
        return tool_result(member.get("call_id"), member.get("output"), calls)
