"""List the fields of a response's request that tell how it was sampled (pure).

Sources: https://platform.openai.com/docs/api-reference/responses/create, and vLLM's
`entrypoints/openai/responses/protocol.py`.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.formats.grammars import forced_by, functions_of, of_text_form, the_grammar
from proxy.formats.sampling import (
    EVERYWHERE,
    BaseSamplingRules,
    free_choice,
    free_form_within,
)

# vLLM takes these for responses too, and does not apply them; another server might.
NOT_APPLIED: Final = ("min_tokens", "bad_words", "allowed_token_ids")


class ResponsesSampling(BaseSamplingRules):
    """Read the settings of responses."""

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

    def grammar(self, fields: Mapping[str, Any], tag: str | None) -> Mapping[str, str] | None:
        """Return the grammar of the text that is asked for, or of calls of tools."""
        text, choice, tools = fields.get("text"), fields.get("tool_choice"), fields.get("tools")
        form = text.get("format") if isinstance(text, dict) else None
        forced = None if free_choice(choice) else forced_by(choice, choice)
        listed = tools if isinstance(tools, list) else []
        plain = all(isinstance(tool, dict) and tool.get("type") == "function" for tool in listed)
        functions = functions_of(listed) if plain else None
        return the_grammar(fields, form, of_text_form, forced, functions, tag)
