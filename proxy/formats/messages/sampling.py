"""List the fields of a request for a message that tell how it was sampled (pure).

Sources: https://docs.anthropic.com/en/api/messages, its beta fields, and vLLM's
`entrypoints/anthropic/protocol.py`.
"""

from collections.abc import Mapping
from typing import Any

from proxy.formats.chat.sampling import grammar_of_chat
from proxy.formats.messages.as_chat import chat_request
from proxy.formats.sampling import (
    EVERYWHERE,
    BaseSamplingRules,
    free_form_within,
    limits_thinking,
)


class MessagesSampling(BaseSamplingRules):
    """Read the settings of messages."""

    settings = frozenset({"stop_sequences", "output_config", "thinking"})
    objects = ("output_config", "thinking")
    harmless = EVERYWHERE | {
        *("messages", "system", "service_tier", "inference_geo", "cache_control", "container"),
        *("context_management", "compaction", "mcp_servers", "betas", "diagnostics"),
        *("user_profile_id", "workspace_id", "speed", "billing_policy", "thread"),
    }

    def reshapes(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a budget ends the thinking."""
        return limits_thinking(settings)

    def constrains(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a tool or a form of the reply is imposed."""
        return super().constrains(settings) or not free_form_within(settings.get("output_config"))

    def grammar(self, fields: Mapping[str, Any], tag: str | None) -> Mapping[str, str] | None:
        """Return the grammar of the chat request that such a message is sent as."""
        as_chat = chat_request(fields)
        return None if as_chat is None else grammar_of_chat(as_chat, tag)
