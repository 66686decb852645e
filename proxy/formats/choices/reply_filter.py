"""Remove from a reply in `choices` what was added because of the request's rewriting (pure).

A worker removes it and passes the rest on. The keeper removes it again and gathers it.
"""

from typing import Annotated, Any, Final, TypeVar

import msgspec

from proxy.formats.base import ModelRequest, Object, Sampled
from proxy.formats.requests import NULL, UNREADABLE, own_name, value_of
from proxy.formats.unparsed import JsonMember, without

IDS: Final = "return_token_ids"
LOGPROBS: Final = "logprobs"
# Errors of reading a reply that is not of the API's shape. Such a reply is passed on as it came,
# without what was added, wherever that stands; its call is not trainable.
ODD_SHAPE: Final = (*UNREADABLE, KeyError, TypeError, AttributeError, ValueError)

ARRAY, OBJECT = b"["[0], b"{"[0]

_choices: Final = msgspec.json.Decoder(list[Object])
_encode: Final = msgspec.json.Encoder().encode
Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Value = TypeVar("Value")


class ReplyFilter:
    """Restore a reply event by event."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin with what `request` was given beside the client's own fields."""
        self.hide_ids = IDS in request.injected
        self.hide_logprobs = LOGPROBS in request.injected
        self._model = own_name(request, served_name)
        # The client's name for the model, if the version's was put into the request.
        self.model = None if self._model is None else request.model
        # Whether the last `restore` changed anything; if not, the bytes are passed on as they came.
        self.changed = False
        # Whether the last `restore` removed ids or log-probabilities from a choice.
        self.took = False
        self._served_name = served_name

    def _added_members(self) -> dict[bytes, JsonMember]:
        members: dict[bytes, JsonMember] = {}
        if self.hide_ids:
            members |= dict.fromkeys((b"prompt_token_ids", b"token_ids"), JsonMember(opens=b"["))
        if self.hide_logprobs:
            members[b"logprobs"] = JsonMember(opens=b"{")
        if self._model is not None:
            served = _encode(self._served_name)
            members[b"model"] = JsonMember(opens=b'"', instead=bytes(self._model), only=served)
        return members

    def hide(self, payload: bytes) -> bytes:
        """Return a payload that cannot be parsed with the values of added members replaced."""
        return without(payload, self._added_members())

    def try_restore(self, parsed: Object) -> list[Object] | None:
        """Return what `restore` does, or None for a reply of another shape than the API's."""
        try:
            return self.restore(parsed)
        except ODD_SHAPE:
            return None

    def restore(self, parsed: Object) -> list[Object]:
        """Restore a reply or an event in place, and return its choices for further reading."""
        self.changed = self._model is not None and "model" in parsed
        if self._model is not None and self.changed:
            parsed["model"] = self._model
        self.changed |= self.take_prompt(parsed)
        self.took = False
        raw_choices = parsed.get("choices")
        if raw_choices is None or raw_choices == NULL:
            return []
        choices = _choices.decode(raw_choices)
        changed = False
        for choice in choices:
            changed |= self.take_choice(choice)
        if changed:
            parsed["choices"] = msgspec.Raw(_encode(choices))
        self.changed |= changed
        return choices

    def take_prompt(self, holder: Object) -> bool:
        """Remove prompt ids; a chat has them beside its choices, a completion within each choice.

        Return whether anything was changed.
        """
        raw = holder.get("prompt_token_ids")
        if raw is None or not begins(raw, ARRAY):
            return False
        if self.hide_ids:
            holder["prompt_token_ids"] = NULL
        return self.hide_ids

    def take_choice(self, choice: Object) -> bool:
        """Remove ids and log-probabilities from a choice; return whether anything was changed."""
        changed = self.take_prompt(choice)
        ids = choice.get("token_ids")
        if self.hide_ids and ids is not None and begins(ids, ARRAY):
            choice["token_ids"] = NULL
            changed = self.took = True
        logprobs = choice.get("logprobs")
        if self.hide_logprobs and logprobs is not None and begins(logprobs, OBJECT):
            choice["logprobs"] = NULL
            changed = self.took = True
        return changed


def begins(raw: msgspec.Raw, with_byte: int) -> bool:
    """Return whether a value is of the type that the API gives; others are not ours to touch."""
    return memoryview(raw)[0] == with_byte


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
