"""The turns of Anthropic's messages: tool calls and results are blocks of a content (pure).

`is_error` of a result is a statement. Where it is left out the API means false.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from proxy.formats.base import ToolResult
from proxy.formats.contents import objects
from proxy.formats.conversation import Conversation
from proxy.formats.turns import UNHEARD_ROLES, BaseTurns, Named, tool_result


class MessagesTurns(BaseTurns):
    """The messages of Anthropic's API."""

    field = "messages"
    states_errors = True

    def _add(self, conversation: Conversation, member: dict[str, Any]) -> None:
        role, content = member.get("role"), member.get("content")
        if role == "assistant":
            conversation.said(content)
            for block in _of_type(content, "tool_use"):
                conversation.called(block.get("id"), block.get("name"), block.get("input"))
        elif isinstance(role, str) and role not in UNHEARD_ROLES:
            conversation.asked(_without_results(conversation, content))

    def _called(self, member: dict[str, Any]) -> Iterable[Named]:
        for block in _of_type(member.get("content"), "tool_use"):
            yield block.get("id"), block.get("name")

    def _results_in(self, member: dict[str, Any], names: Mapping[str, str]) -> Iterable[ToolResult]:
        for block in _of_type(member.get("content"), "tool_result"):
            stated = block.get("is_error")
            yield from tool_result(
                block.get("tool_use_id"),
                block.get("content"),
                names,
                stated if isinstance(stated, bool) else None,
            )


def _of_type(content: Any, kind: str) -> Iterator[dict[str, Any]]:
    return (block for block in objects(content) if block.get("type") == kind)


def _without_results(conversation: Conversation, content: Any) -> Any:
    """Add a user's tool results to the conversation, and return the rest of what was said."""
    if not isinstance(content, list):
        return content
    others = []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "tool_result":
            conversation.result(part.get("tool_use_id"), part.get("content"))
        else:
            others.append(part)
    return others
