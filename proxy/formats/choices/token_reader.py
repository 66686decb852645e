"""Gathers the token data that is removed from a reply in `choices` (pure)."""

from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec

from proxy.formats.base import ModelRequest, Sampled
from proxy.formats.choices.reply_filter import ARRAY, OBJECT, ODD_SHAPE, ReplyFilter, begins
from proxy.formats.json_parts import NULL, Object, value_of

Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Token(msgspec.Struct, gc=False):
    logprob: float


class Logprobs(msgspec.Struct, gc=False):
    """Log-probabilities, in a chat's form (`content`) or in a completion's (`token_logprobs`)."""

    content: list[_Token] | None = None
    token_logprobs: list[float | None] | None = None

    def values(self) -> list[float]:
        """Return the log-probabilities of either form, without nulls.

        An echoed prompt's first token has null.
        """
        if self.token_logprobs is not None:
            return [value for value in self.token_logprobs if value is not None]
        return [token.logprob for token in self.content or ()]


_ids: Final = msgspec.json.Decoder(list[Id])
_logprobs: Final = msgspec.json.Decoder(Logprobs)


class TokenReader(ReplyFilter):
    """Restores a reply as the worker does, and gathers what is removed from it."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin with what `request` was given beside the client's own fields."""
        super().__init__(request, served_name)
        # Something removed was not of the API's shape, so none of it can be trusted.
        self._unsound = False
        self.prompt_ids: list[int] | None = None
        self.sampled_ids: list[int] | None = None
        self.sampled_logprobs: list[float] | None = None
        self.indices: set[int] = set()

    def take_prompt(self, holder: Object) -> bool:
        """Gather the prompt ids of a reply or a choice, and remove them as the worker does."""
        raw = holder.get("prompt_token_ids")
        if raw is not None and begins(raw, ARRAY):
            self._gather(raw, self._took_prompt)
        return super().take_prompt(holder)

    def take_choice(self, choice: Object) -> bool:
        """Gather ids and log-probabilities of a choice, and remove them as the worker does."""
        self._gather(choice.get("index", NULL), self._took_index)
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if ids is not None and begins(ids, ARRAY):
            self._gather(ids, lambda raw: self.took_ids(_ids.decode(raw)))
        if logprobs is not None and begins(logprobs, OBJECT):
            self._gather(logprobs, lambda raw: self.took_logprobs(_logprobs.decode(raw)))
        return super().take_choice(choice)

    def _gather(self, raw: msgspec.Raw, take: Callable[[msgspec.Raw], None]) -> None:
        """Read a value that is removed; if it cannot be read it is removed all the same."""
        try:
            take(raw)
        except ODD_SHAPE:
            self._unsound = True

    def _took_prompt(self, raw: msgspec.Raw) -> None:
        self.prompt_ids = _ids.decode(raw)

    def _took_index(self, raw: msgspec.Raw) -> None:
        self.indices.add(int(value_of(raw) or 0))

    def took_ids(self, ids: list[int]) -> None:
        """Add sampled token ids."""
        self.sampled_ids = self.sampled_ids or []
        self.sampled_ids += ids

    def took_logprobs(self, logprobs: Logprobs) -> None:
        """Add the log-probabilities of sampled tokens."""
        self.sampled_logprobs = self.sampled_logprobs or []
        self.sampled_logprobs += logprobs.values()

    def sampled(self, usage: dict[str, Any] | None) -> Sampled:
        """Return what was gathered, without ids if some of it could not be read."""
        sound = not self._unsound
        return Sampled(
            prompt_ids=_tuple(self.prompt_ids) if sound else None,
            sampled_ids=_tuple(self.sampled_ids) if sound else None,
            sampled_logprobs=_tuple(self.sampled_logprobs) if sound else None,
            choices=len(self.indices),
            completion_tokens=(usage or {}).get("completion_tokens"),
        )


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
