"""The wire format of `/v1/completions`: a prompt to continue, without turns (pure)."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from proxy.formats.choices import IDS, LOGPROBS, ChoicesFormat, ChoicesReply
from proxy.formats.conversation import Turns
from proxy.formats.raw_json import NULL, Object
from proxy.formats.sampling import HARMLESS_FIELDS, SamplingRules, grammar_of, is_free_form


class CompletionsTurns(Turns):
    def user_contents(self, parsed: Object) -> Iterable[msgspec.Raw]:
        """Return nothing: a prompt does not separate instructions from user text."""
        return ()

    def only_text(self, parsed: Object) -> bool:
        """Return whether the prompt is text or ids, without embeddings."""
        return parsed.get("prompt_embeds", NULL) == NULL


class CompletionsSampling(SamplingRules):
    settings = frozenset({"response_format"})
    harmless = HARMLESS_FIELDS | {"prompt", "prompt_embeds", "logprobs", "echo", "suffix"}

    def constrains(self, settings: Mapping[str, Any]) -> bool:
        return super().constrains(settings) or not is_free_form(settings.get("response_format"))

    def grammar(self, fields: Mapping[str, Any], tag: str | None) -> Mapping[str, str] | None:
        return grammar_of(fields, fields.get("response_format"))


class CompletionsReply(ChoicesReply):
    reply_object = "text_completion"


class CompletionsFormat(ChoicesFormat):
    name = "completions"
    title = "OpenAI completions"
    path = "/v1/completions"
    unneeded_fields = ("prompt",)
    turns = CompletionsTurns()
    sampling = CompletionsSampling()
    parser = CompletionsReply
    # Here `logprobs` is a number: how many alternatives beside the sampled token.
    token_data_fields: Mapping[str, msgspec.Raw] = {
        LOGPROBS: msgspec.Raw(b"0"),
        IDS: msgspec.Raw(b"true"),
    }
    number_fields = (LOGPROBS,)
    # vLLM omits the prompt's text from the echo if ids are requested.
    blocking_fields = ("echo",)


COMPLETIONS: Final = CompletionsFormat()
