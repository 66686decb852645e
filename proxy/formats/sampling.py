"""Share what the sampling rules of all formats have in common (pure)."""

from collections.abc import Mapping
from typing import Any, Final

# The forms of `tool_choice`, in all APIs, that constrain nothing.
FREE_CHOICES: Final = (None, "auto", "none", {"type": "auto"}, {"type": "none"})
# Fields of vLLM's requests that choose what is shown, kept, cached, queued or put into the prompt.
# The recorded ids hold what became of the prompt, and a stop only ends what was sampled.
SERVERS_OWN: Final = frozenset(
    {
        *("model", "stream", "user", "session_id", "request_id", "priority", "cache_salt"),
        *("ignore_eos", "include_stop_str_in_output", "repetition_detection"),
        *("skip_special_tokens", "spaces_between_special_tokens", "stream_interval"),
        *("kv_transfer_params", "ec_transfer_params", "mm_payload", "return_mm_kwargs"),
        *("return_token_ids", "return_tokens_as_token_ids", "return_token_offsets"),
        *("routed_experts_prompt_start", "truncate_prompt_tokens", "truncation_side"),
        *("add_special_tokens", "prompt_logprobs", "logprob_token_ids", "length_penalty"),
        *("chat_template", "chat_template_kwargs", "documents", "include_reasoning"),
        *("media_io_kwargs", "mm_processor_kwargs"),
    }
)
# Names that agent tools put beside an API's own fields (`proxy.identity.names`), and litellm's.
TOOLS_OWN: Final = frozenset(
    {"metadata", "conversation", "client_metadata", "litellm_session_id", "litellm_trace_id"}
)
EVERYWHERE: Final = SERVERS_OWN | TOOLS_OWN | {"tools", "stream_options", "parallel_tool_calls"}


class BaseSamplingRules:
    """Define the rules of a format that adds no setting to those of the model server."""

    settings: frozenset[str] = frozenset()
    objects: tuple[str, ...] = ()
    harmless: frozenset[str] = EVERYWHERE

    def reshapes(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a setting of this format's changes the distribution."""
        return False

    def constrains(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a setting of this format's lets some tokens never be sampled."""
        return not free_choice(settings.get("tool_choice"))

    def grammar(self, fields: Mapping[str, Any], tag: str | None) -> Mapping[str, str] | None:
        """Return the grammar that a request holds its reply to, if that can be read of it."""
        return None


def free_choice(choice: Any) -> bool:
    """Return whether a `tool_choice` leaves the model free to call a tool or not."""
    if isinstance(choice, dict):
        # The limit on calls in a reply counts for all choices (`proxy.keeper.sampling`).
        choice = {n: v for n, v in choice.items() if n != "disable_parallel_tool_use"}
    return choice in FREE_CHOICES


def free_form(form: Any) -> bool:
    """Return whether the form that a reply must have, if any, is plain text."""
    return form is None or (isinstance(form, dict) and form.get("type") == "text")


def free_form_within(holder: Any) -> bool:
    """Return whether a setting's `format`, if it has one, is plain text."""
    return not isinstance(holder, dict) or free_form(holder.get("format"))


def limits_thinking(settings: Mapping[str, Any]) -> bool:
    """Return whether a budget ends the thinking, whose end is then forced and not sampled."""
    thinking = settings.get("thinking")
    return isinstance(thinking, dict) and thinking.get("budget_tokens") is not None
