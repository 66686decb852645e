"""Read the turns of the toy API: who said what, and what a tool gave back."""

from collections.abc import Iterable
from typing import Any

import msgspec

from proxy.formats.conversation import (
    Calls,
    Conversation,
    ToolCallShown,
    ToolResult,
    Turns,
    tool_result,
)
from proxy.formats.raw_json import Object, value_of


class ToyTurns(Turns):
    """Read `said`, a list of `{"by": "me" | "toy" | "tool", "words": …}`."""

    field = "said"
    states_errors = True

    def _add(self, conversation: Conversation, member: dict[str, Any]) -> None:
        match member.get("by"):
            case "toy":
                conversation.add_assistant(member.get("words"))
                if "tool" in member:
                    conversation.add_tool_call(member.get("call"), member["tool"], None)
            case "tool":
                conversation.add_tool_result(member.get("call"), member.get("words"))
            case _:
                conversation.add_user(member.get("words"))

    def _user_content(self, member: Object) -> msgspec.Raw | None:
        return member.get("words") if value_of(member.get("by")) == "me" else None

    def _is_text(self, member: Object) -> bool:
        return "picture" not in member

    def _is_assistants(self, member: dict[str, Any]) -> bool:
        return member.get("by") == "toy"

    def _called(self, member: dict[str, Any]) -> Iterable[ToolCallShown]:
        return (ToolCallShown(member.get("call"), member.get("tool"), None),)

    def _results_in(self, member: dict[str, Any], calls: Calls) -> Iterable[ToolResult]:
        failed = True if member.get("failed") is True else None
        return tool_result(member.get("call"), member.get("words"), calls, failed)
