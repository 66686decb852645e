"""The fields of a response's request that tell how it was sampled (pure).

Sources: https://platform.openai.com/docs/api-reference/responses/create, and vLLM's
`entrypoints/openai/responses/protocol.py`.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.formats.sampling import EVERYWHERE, BaseSamplingRules, free_form_within

# vLLM takes these for responses too, and does not apply them; another server might.
NOT_APPLIED: Final = ("min_tokens", "bad_words", "allowed_token_ids")


class ResponsesSampling(BaseSamplingRules):
    """The settings of responses."""

    settings = frozenset({"max_output_tokens", "text"})
    objects = ("text",)
    harmless = EVERYWHERE | {
        *("input", "instructions", "previous_response_id", "conversation", "prompt", "store"),
        *("background", "include", "max_tool_calls", "reasoning", "service_tier", "truncation"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "moderation"),
        *("safety_identifier", "top_logprobs", "context_management", "access_programs"),
        *("enable_response_messages", "previous_input_messages", "image"),
    }

    def reshapes(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a setting is named of which it is open whether the server applies it."""
        return any(settings.get(name) for name in NOT_APPLIED)

    def constrains(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a tool or a form of the text is imposed."""
        return super().constrains(settings) or not free_form_within(settings.get("text"))
