"""Read blocks of a message's content, in Anthropic's API and in some clients' chats (pure)."""

from collections.abc import Iterator
from typing import Any

from proxy.formats.contents import objects
from proxy.formats.conversation import Conversation


def blocks_of(content: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Return the blocks of one type in a content."""
    return (block for block in objects(content) if block.get("type") == kind)


def add_tool_calls(conversation: Conversation, content: Any) -> None:
    """Add the tool calls among an assistant's blocks to the conversation."""
    for block in blocks_of(content, "tool_use"):
        conversation.called(block.get("id"), block.get("name"), block.get("input"))


def add_user_turn(conversation: Conversation, content: Any) -> None:
    """Add a user's tool results to the conversation, and then the rest of what was said."""
    if not isinstance(content, list):
        conversation.asked(content)
        return
    others = []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "tool_result":
            conversation.result(part.get("tool_use_id"), part.get("content"))
        else:
            others.append(part)
    conversation.asked(others)
