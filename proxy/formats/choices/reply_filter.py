"""Removes from a reply in `choices` what was added because of the request's rewriting (pure)."""

from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec

from proxy.calls.trainable import Sampled
from proxy.formats.base import NULL, UNREADABLE, ModelRequest, Object, own_name, value_of
from proxy.formats.blind import Member, without

IDS: Final = "return_token_ids"
LOGPROBS: Final = "logprobs"
# Errors of reading a reply that is not of the API's shape. Such a reply is passed on as it came,
# without what was added, wherever that stands; its call is not trainable.
ODD_SHAPE: Final = (*UNREADABLE, KeyError, TypeError, AttributeError, ValueError)

Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
ARRAY, OBJECT = b"["[0], b"{"[0]


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
_choices: Final = msgspec.json.Decoder(list[Object])
_encode: Final = msgspec.json.Encoder().encode


class ReplyFilter:
    """Restores a reply event by event; if `reading`, also gathers what it removes."""

    def __init__(self, request: ModelRequest, served_name: str | None, *, reading: bool) -> None:
        """Begin with what `request` was given beside the client's own fields."""
        self.hide_ids = IDS in request.injected
        self.hide_logprobs = LOGPROBS in request.injected
        self._model = own_name(request, served_name)
        # The client's name for the model, if the version's was put into the request.
        self.model = None if self._model is None else request.model
        self._reading = reading
        # Whether the last `restore` changed anything; if not, the bytes are passed on as they came.
        self.changed = False
        # Whether the last `restore` removed ids or log-probabilities from a choice.
        self.took = False
        # Something removed was not of the API's shape, so none of it can be trusted.
        self._unsound = False
        self._served_name = served_name
        self.prompt_ids: list[int] | None = None
        self.sampled_ids: list[int] | None = None
        self.sampled_logprobs: list[float] | None = None
        self.indices: set[int] = set()

    def _added_members(self) -> dict[bytes, Member]:
        members: dict[bytes, Member] = {}
        if self.hide_ids:
            members |= dict.fromkeys((b"prompt_token_ids", b"token_ids"), Member(opens=b"["))
        if self.hide_logprobs:
            members[b"logprobs"] = Member(opens=b"{")
        if self._model is not None:
            served = _encode(self._served_name)
            members[b"model"] = Member(opens=b'"', instead=bytes(self._model), only=served)
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
        self.changed |= self._take_prompt(parsed)
        self.took = False
        raw_choices = parsed.get("choices")
        if raw_choices is None or raw_choices == NULL:
            return []
        choices = _choices.decode(raw_choices)
        changed = False
        for choice in choices:
            changed |= self._take_choice(choice)
        if changed:
            parsed["choices"] = msgspec.Raw(_encode(choices))
        self.changed |= changed
        return choices

    def _take_prompt(self, holder: Object) -> bool:
        """Remove prompt ids; a chat has them beside its choices, a completion within each choice.

        Return whether anything was changed.
        """
        raw = holder.get("prompt_token_ids")
        if raw is None or not _begins(raw, ARRAY):
            return False
        if self._reading:
            self._gather(raw, self._took_prompt)
        if self.hide_ids:
            holder["prompt_token_ids"] = NULL
        return self.hide_ids

    def _take_choice(self, choice: Object) -> bool:
        """Remove ids and log-probabilities from a choice; return whether anything was changed."""
        if self._reading:
            self._gather(choice.get("index", NULL), self._took_index)
        changed = self._take_prompt(choice)
        ids = choice.get("token_ids")
        if ids is not None and _begins(ids, ARRAY):
            if self._reading:
                self._gather(ids, lambda raw: self.took_ids(_ids.decode(raw)))
            if self.hide_ids:
                choice["token_ids"] = NULL
                changed = self.took = True
        logprobs = choice.get("logprobs")
        if logprobs is not None and _begins(logprobs, OBJECT):
            if self._reading:
                self._gather(logprobs, lambda raw: self.took_logprobs(_logprobs.decode(raw)))
            if self.hide_logprobs:
                choice["logprobs"] = NULL
                changed = self.took = True
        return changed

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


def _begins(raw: msgspec.Raw, with_byte: int) -> bool:
    """Return whether a value is of the type that the API gives; others are not ours to touch."""
    return memoryview(raw)[0] == with_byte


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
