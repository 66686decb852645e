"""Read a text completion's request: a prompt, and no turns (pure)."""

from proxy.formats.base import Object
from proxy.formats.turns import BaseTurns, is_given


class CompletionsTurns(BaseTurns):
    """Read the prompt of a completion."""

    def only_text(self, parsed: Object) -> bool:
        """Return whether the prompt is text or ids, and nothing of it embeddings."""
        return not is_given(parsed.get("prompt_embeds"))
