"""Read the turns of Anthropic's messages: tool calls and results are blocks of a content (pure).

`is_error` of a result is a statement. Where it is left out the API means false.
"""

from collections.abc import Iterable
from typing import Any

from proxy.formats.base import ToolResult
from proxy.formats.blocks import add_tool_calls, add_user_turn, blocks_of
from proxy.formats.conversation import Conversation
from proxy.formats.json_parts import Object
from proxy.formats.only_text import is_only_text
from proxy.formats.turns import UNHEARD_ROLES, BaseTurns, Calls, Named, tool_result


class MessagesTurns(BaseTurns):
    """Read the messages of Anthropic's API."""

    field = "messages"
    states_errors = True

    def only_text(self, parsed: Object) -> bool:
        """Return whether the system's text and the messages are all text."""
        return is_only_text(parsed.get("system")) and super().only_text(parsed)

    def _add(self, conversation: Conversation, member: dict[str, Any]) -> None:
        role, content = member.get("role"), member.get("content")
        if role == "assistant":
            conversation.said(content)
            add_tool_calls(conversation, content)
        elif isinstance(role, str) and role not in UNHEARD_ROLES:
            add_user_turn(conversation, content)

    def _called(self, member: dict[str, Any]) -> Iterable[Named]:
        for block in blocks_of(member.get("content"), "tool_use"):
            yield block.get("id"), block.get("name"), block.get("input")

    def _results_in(self, member: dict[str, Any], calls: Calls) -> Iterable[ToolResult]:
        for block in blocks_of(member.get("content"), "tool_result"):
            stated = block.get("is_error")
            yield from tool_result(
                block.get("tool_use_id"),
                block.get("content"),
                calls,
                stated if isinstance(stated, bool) else None,
            )
