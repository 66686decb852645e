"""Speak `/v1/completions`: a text goes on; a request holds no turns of a conversation (pure)."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from proxy.formats.choices import IDS, LOGPROBS, ChoicesFormat, ChoicesReply
from proxy.formats.conversation import Turns
from proxy.formats.raw_json import NULL, Object
from proxy.formats.sampling import EVERYWHERE, SamplingRules, free_form, grammar_of


class CompletionsTurns(Turns):
    """Read the prompt of a completion."""

    def said_by_users(self, parsed: Object) -> Iterable[msgspec.Raw]:
        """Return nothing: a prompt has no instructions apart."""
        return ()

    def only_text(self, parsed: Object) -> bool:
        """Return whether the prompt is text or ids, and nothing of it embeddings."""
        return parsed.get("prompt_embeds", NULL) == NULL


class CompletionsSampling(SamplingRules):
    """Read the settings of text completions."""

    settings = frozenset({"response_format"})
    harmless = EVERYWHERE | {"prompt", "prompt_embeds", "logprobs", "echo", "suffix"}

    def constrains(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a form of the reply is imposed."""
        return super().constrains(settings) or not free_form(settings.get("response_format"))

    def grammar(self, fields: Mapping[str, Any], tag: str | None) -> Mapping[str, str] | None:
        """Return the grammar of the form that is asked for."""
        return grammar_of(fields, fields.get("response_format"))


class CompletionsReply(ChoicesReply):
    """Follow a text completion."""

    reply_object = "text_completion"


class CompletionsFormat(ChoicesFormat):
    """Speak text completions."""

    name = "completions"
    title = "OpenAI completions"
    path = "/v1/completions"
    unread = ("prompt",)
    turns = CompletionsTurns()
    sampling = CompletionsSampling()
    parser = CompletionsReply
    # Here `logprobs` is a number: how many alternatives beside the sampled token.
    wanted: Mapping[str, msgspec.Raw] = {LOGPROBS: msgspec.Raw(b"0"), IDS: msgspec.Raw(b"true")}
    numbers = (LOGPROBS,)
    # With ids asked for, the prompt's text is left out of the echo.
    spoiling = ("echo",)


COMPLETIONS: Final = CompletionsFormat()
