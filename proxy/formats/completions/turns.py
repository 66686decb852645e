"""Read a text completion's request: a prompt, and no turns (pure)."""

from proxy.formats.json_parts import Object
from proxy.formats.only_text import is_given
from proxy.formats.turns import BaseTurns


class CompletionsTurns(BaseTurns):
    """Read the prompt of a completion."""

    def only_text(self, parsed: Object) -> bool:
        """Return whether the prompt is text or ids, and nothing of it embeddings."""
        return not is_given(parsed.get("prompt_embeds"))
