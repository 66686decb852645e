"""Remove from a reply in `choices` what was added because of the request's rewriting (pure)."""

from typing import Final

import msgspec

from proxy.formats.base import ModelRequest
from proxy.formats.blind import Member, without
from proxy.formats.json_parts import NULL, UNREADABLE, Object
from proxy.formats.requests import own_name

IDS: Final = "return_token_ids"
LOGPROBS: Final = "logprobs"
# Errors of reading a reply that is not of the API's shape. Such a reply is passed on as it came,
# without what was added, wherever that stands; its call is not trainable.
ODD_SHAPE: Final = (*UNREADABLE, KeyError, TypeError, AttributeError, ValueError)

ARRAY, OBJECT = b"["[0], b"{"[0]

_choices: Final = msgspec.json.Decoder(list[Object])
_encode: Final = msgspec.json.Encoder().encode


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
