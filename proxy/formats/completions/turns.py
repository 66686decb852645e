"""Read a text completion's request: a prompt, and no turns (pure)."""

from collections.abc import Iterable

import msgspec

from proxy.formats.base import Object
from proxy.formats.turns import BaseTurns, is_given


class CompletionsTurns(BaseTurns):
    """Read the prompt of a completion."""

    def said_by_users(self, parsed: Object) -> Iterable[msgspec.Raw]:
        """Return nothing: a prompt has no instructions apart."""
        return ()

    def only_text(self, parsed: Object) -> bool:
        """Return whether the prompt is text or ids, and nothing of it embeddings."""
        return not is_given(parsed.get("prompt_embeds"))
