"""Gather the token data that is removed from a reply in `choices` (pure)."""

from typing import Annotated, Any, Final, TypeVar

import msgspec

from proxy.formats.base import ModelRequest, Sampled
from proxy.formats.choices.reply_filter import ARRAY, OBJECT, ODD_SHAPE, ReplyFilter, begins
from proxy.formats.json_parts import Object, value_of

Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Value = TypeVar("Value")


class _Token(msgspec.Struct, gc=False):
    logprob: float


class Logprobs(msgspec.Struct, gc=False):
    """Hold log-probabilities in a chat's form (`content`) or a completion's (`token_logprobs`)."""

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
    """Restore a reply as the worker does, and gather what is removed from it."""

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
        ids = self._read(holder.get("prompt_token_ids"), ARRAY, _ids)
        if ids is not None:
            self.prompt_ids = ids
        return super().take_prompt(holder)

    def take_choice(self, choice: Object) -> bool:
        """Gather ids and log-probabilities of a choice, and remove them as the worker does."""
        self._take_index(choice.get("index"))
        ids = self._read(choice.get("token_ids"), ARRAY, _ids)
        if ids is not None:
            self.took_ids(ids)
        logprobs = self._read(choice.get("logprobs"), OBJECT, _logprobs)
        if logprobs is not None:
            self.took_logprobs(logprobs)
        return super().take_choice(choice)

    def _read(
        self, raw: msgspec.Raw | None, opens: int, decoder: msgspec.json.Decoder[Value]
    ) -> Value | None:
        """Return a value that is removed, or None if there is none of the API's type.

        If it cannot be read it is removed all the same.
        """
        if raw is None or not begins(raw, opens):
            return None
        try:
            return decoder.decode(raw)
        except ODD_SHAPE:
            self._unsound = True
            return None

    def _take_index(self, raw: msgspec.Raw | None) -> None:
        try:
            self.indices.add(int(value_of(raw) or 0))
        except ODD_SHAPE:
            self._unsound = True

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
