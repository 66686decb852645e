"""List the fields of a text completion's request that tell how it was sampled (pure).

Sources: https://platform.openai.com/docs/api-reference/completions/create, and vLLM's
`entrypoints/openai/completion/protocol.py`.
"""

from collections.abc import Mapping
from typing import Any

from proxy.formats.grammars import of_form, the_grammar
from proxy.formats.sampling import EVERYWHERE, BaseSamplingRules, free_form


class CompletionsSampling(BaseSamplingRules):
    """Read the settings of text completions."""

    settings = frozenset({"response_format"})
    harmless = EVERYWHERE | {"prompt", "prompt_embeds", "logprobs", "echo", "suffix"}

    def constrains(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a form of the reply is imposed."""
        return super().constrains(settings) or not free_form(settings.get("response_format"))

    def grammar(self, fields: Mapping[str, Any], tag: str | None) -> Mapping[str, str] | None:
        """Return the grammar of the form that is asked for."""
        return the_grammar(fields, fields.get("response_format"), of_form)
