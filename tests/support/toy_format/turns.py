"""Read the turns of the toy API: who said what, and what a tool gave back."""

from collections.abc import Iterable
from typing import Any

import msgspec

from proxy.formats.base import Object, ToolResult
from proxy.formats.conversation import Conversation
from proxy.formats.requests import value_of
from proxy.formats.turns import BaseTurns, Calls, Named, tool_result


class ToyTurns(BaseTurns):
    """Read `said`, a list of `{"by": "me" | "toy" | "tool", "words": …}`."""

    field = "said"
    states_errors = True

    def _add(self, conversation: Conversation, member: dict[str, Any]) -> None:
        match member.get("by"):
            case "toy":
                conversation.said(member.get("words"))
                if "tool" in member:
                    conversation.called(member.get("call"), member["tool"], None)
            case "tool":
                conversation.result(member.get("call"), member.get("words"))
            case _:
                conversation.asked(member.get("words"))

    def _said_by_user(self, member: Object) -> msgspec.Raw | None:
        return member.get("words") if value_of(member.get("by")) == "me" else None

    def _is_text(self, member: Object) -> bool:
        return "picture" not in member

    def _is_assistants(self, member: dict[str, Any]) -> bool:
        return member.get("by") == "toy"

    def _called(self, member: dict[str, Any]) -> Iterable[Named]:
        return ((member.get("call"), member.get("tool"), None),)

    def _results_in(self, member: dict[str, Any], calls: Calls) -> Iterable[ToolResult]:
        failed = True if member.get("failed") is True else None
        return tool_result(member.get("call"), member.get("words"), calls, failed)
