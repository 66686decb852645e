"""Read the turns of Anthropic's messages: tool calls and results are blocks of a content (pure).

`is_error` of a result is a statement. Where it is left out the API means false.
"""

from collections.abc import Iterable
from typing import Any

from proxy.formats.base import Object, ToolResult
from proxy.formats.contents import blocks_of
from proxy.formats.conversation import Conversation
from proxy.formats.turns import UNHEARD_ROLES, BaseTurns, Calls, Named, is_only_text, tool_result


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
            conversation.called_in(content)
        elif isinstance(role, str) and role not in UNHEARD_ROLES:
            conversation.took_turn(content)

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
