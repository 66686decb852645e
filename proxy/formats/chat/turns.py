"""Read the turns of a chat: messages with roles, tool calls beside their content (pure)."""

from collections.abc import Iterable
from typing import Any, Final

from proxy.formats.base import Object, ToolResult
from proxy.formats.contents import objects
from proxy.formats.conversation import Conversation
from proxy.formats.requests import readable_value
from proxy.formats.turns import (
    TOOL_ROLES,
    UNHEARD_ROLES,
    BaseTurns,
    Calls,
    Named,
    is_given,
    tool_result,
)

# What may be asked for besides nothing.
TEXT_ALONE: Final[tuple[object, ...]] = (None, [], ["text"])


class ChatTurns(BaseTurns):
    """Read the messages of a chat."""

    field = "messages"

    def only_text(self, parsed: Object) -> bool:
        """Return whether the messages are all text, and text is all that is asked for."""
        asked = parsed.get("modalities")
        alone = asked is None or readable_value(asked) in TEXT_ALONE
        return alone and super().only_text(parsed)

    def _is_text(self, member: Object) -> bool:
        """Return whether a message is all text; an assistant's may name what it said aloud."""
        return not is_given(member.get("audio")) and super()._is_text(member)

    def _add(self, conversation: Conversation, member: dict[str, Any]) -> None:
        role = member.get("role")
        if role == "assistant":
            conversation.said(member.get("content"))
            for call in objects(member.get("tool_calls")):
                function = call.get("function")
                function = function if isinstance(function, dict) else {}
                conversation.called(call.get("id"), function.get("name"), function.get("arguments"))
            conversation.called_in(member.get("content"))
        elif role in TOOL_ROLES:
            conversation.result(member.get("tool_call_id"), member.get("content"))
        elif isinstance(role, str) and role not in UNHEARD_ROLES:
            conversation.took_turn(member.get("content"))

    def _called(self, member: dict[str, Any]) -> Iterable[Named]:
        for call in objects(member.get("tool_calls")):
            is_custom = call.get("type") == "custom"
            of_kind = call.get("custom" if is_custom else "function")
            given = of_kind if isinstance(of_kind, dict) else {}
            arguments = given.get("input" if is_custom else "arguments")
            yield call.get("id"), given.get("name"), arguments

    def _results_in(self, member: dict[str, Any], calls: Calls) -> Iterable[ToolResult]:
        if member.get("role") != "tool":
            return ()
        return tool_result(member.get("tool_call_id"), member.get("content"), calls)
