"""List the fields of a chat completion's request that tell how it was sampled (pure).

Sources: https://platform.openai.com/docs/api-reference/chat/create, and vLLM's
`entrypoints/openai/chat_completion/protocol.py`.
"""

from collections.abc import Mapping
from typing import Any

from proxy.formats.grammars import forced_by, functions_of, of_form, the_grammar
from proxy.formats.sampling import (
    EVERYWHERE,
    BaseSamplingRules,
    free_choice,
    free_form,
    limits_thinking,
)


class ChatSampling(BaseSamplingRules):
    """Read the settings of chat completions; `thinking` is what litellm passes on to Anthropic."""

    settings = frozenset({"max_completion_tokens", "response_format", "thinking", "function_call"})
    objects = ("thinking",)
    harmless = EVERYWHERE | {
        *("messages", "logprobs", "top_logprobs", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "moderation"),
        *("reasoning_effort", "reasoning", "verbosity", "modalities", "audio", "prediction"),
        *("web_search_options", "add_generation_prompt", "continue_final_message", "echo"),
        *("return_prompt_text", "functions"),
    }

    def reshapes(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a budget ends the thinking."""
        return limits_thinking(settings)

    def constrains(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a tool or a form of the reply is imposed."""
        if not free_choice(settings.get("function_call")):
            return True
        return super().constrains(settings) or not free_form(settings.get("response_format"))

    def grammar(self, fields: Mapping[str, Any], tag: str | None) -> Mapping[str, str] | None:
        """Return the grammar of the form that is asked for, or of calls of tools."""
        return grammar_of_chat(fields, tag) if free_choice(fields.get("function_call")) else None


def grammar_of_chat(fields: Mapping[str, Any], tag: str | None) -> Mapping[str, str] | None:
    """Return the grammar of a chat request, if it has one that can be read."""
    choice, forced = fields.get("tool_choice"), None
    if not free_choice(choice):
        forced = forced_by(choice, choice.get("function") if isinstance(choice, dict) else None)
    functions = functions_of(list(map(_function, _tools(fields))))
    return the_grammar(fields, fields.get("response_format"), of_form, forced, functions, tag)


def _tools(fields: Mapping[str, Any]) -> list[Any]:
    tools = fields.get("tools")
    return tools if isinstance(tools, list) else []


def _function(tool: Any) -> Any:
    is_function = isinstance(tool, dict) and tool.get("type", "function") == "function"
    return tool.get("function") if is_function else None
