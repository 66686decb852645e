"""Takes out of a reply in `choices` what the request's rewriting put in (pure)."""

from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec

from proxy.dialects.base import NULL, UNREADABLE, ModelRequest, Object, own_name, value_of
from proxy.dialects.blind import Member, without
from proxy.trainable import Sampled

IDS: Final = "return_token_ids"
LOGPROBS: Final = "logprobs"
# What reading a reply raises that is not of the API's shape. Such a reply is passed on as it
# came, less what was added wherever it stands, and its call is not trainable.
ODD_SHAPE: Final = (*UNREADABLE, KeyError, TypeError, AttributeError, ValueError)

Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
ARRAY, OBJECT = b"["[0], b"{"[0]


class _Token(msgspec.Struct, gc=False):
    logprob: float


class Logprobs(msgspec.Struct, gc=False):
    """A chat's `content`, or a completion's `token_logprobs`."""

    content: list[_Token] | None = None
    token_logprobs: list[float | None] | None = None

    def values(self) -> list[float]:
        """In either form; an echoed prompt's first token has none (null)."""
        if self.token_logprobs is not None:
            return [value for value in self.token_logprobs if value is not None]
        return [token.logprob for token in self.content or ()]


_ids: Final = msgspec.json.Decoder(list[Id])
_logprobs: Final = msgspec.json.Decoder(Logprobs)
_choices: Final = msgspec.json.Decoder(list[Object])
_encode: Final = msgspec.json.Encoder().encode


class Undo:
    """Undoes, event by event; where `reading`, gathers what it takes out as well."""

    def __init__(self, request: ModelRequest, served_name: str | None, *, reading: bool) -> None:
        self.hide_ids = IDS in request.injected
        self.hide_logprobs = LOGPROBS in request.injected
        self._model = own_name(request, served_name)
        # What stands for the version's name, where that was put into the request.
        self.model = None if self._model is None else request.model
        self._reading = reading
        # Whether the last `restore` changed anything: what it did not goes on as it came.
        self.changed = False
        # Whether that took ids or log-probabilities out of a choice.
        self.took = False
        # What was taken out is none that the API gives: nothing of it is known for sure.
        self._unsound = False
        self._members = self._added_members(served_name)
        self.prompt_ids: list[int] | None = None
        self.sampled_ids: list[int] | None = None
        self.sampled_logprobs: list[float] | None = None
        self.indices: set[int] = set()

    def _added_members(self, served_name: str | None) -> dict[bytes, Member]:
        members: dict[bytes, Member] = {}
        if self.hide_ids:
            members |= dict.fromkeys((b"prompt_token_ids", b"token_ids"), Member(opens=b"["))
        if self.hide_logprobs:
            members[b"logprobs"] = Member(opens=b"{")
        if self._model is not None:
            served = _encode(served_name)
            members[b"model"] = Member(opens=b'"', instead=bytes(self._model), only=served)
        return members

    def hide(self, payload: bytes) -> bytes:
        """Return what is no JSON object of the API's without what was added, else as it is."""
        return without(payload, self._members)

    def try_restore(self, parsed: Object) -> list[Object] | None:
        """`restore`, or None for a reply of another shape than the API's."""
        try:
            return self.restore(parsed)
        except ODD_SHAPE:
            return None

    def restore(self, parsed: Object) -> list[Object]:
        """Undo in place; returns the choices, for what else is to be read from them."""
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
        """Prompt ids stand beside the choices in a chat, and in each choice in a completion."""
        raw = holder.get("prompt_token_ids")
        if raw is None or not _begins(raw, ARRAY):
            return False
        if self._reading:
            self._gather(raw, self._took_prompt)
        if self.hide_ids:
            holder["prompt_token_ids"] = NULL
        return self.hide_ids

    def _take_choice(self, choice: Object) -> bool:
        """Whether anything of the choice was changed."""
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
        """Read what is there; what cannot be read leaves all the same, as it does in the worker."""
        try:
            take(raw)
        except ODD_SHAPE:
            self._unsound = True

    def _took_prompt(self, raw: msgspec.Raw) -> None:
        self.prompt_ids = _ids.decode(raw)

    def _took_index(self, raw: msgspec.Raw) -> None:
        self.indices.add(int(value_of(raw) or 0))

    def took_ids(self, ids: list[int]) -> None:
        """More ids were sampled."""
        self.sampled_ids = self.sampled_ids or []
        self.sampled_ids += ids

    def took_logprobs(self, logprobs: Logprobs) -> None:
        """With these log-probabilities."""
        self.sampled_logprobs = self.sampled_logprobs or []
        self.sampled_logprobs += logprobs.values()

    def sampled(self, usage: dict[str, Any] | None) -> Sampled:
        """What was gathered; no ids where some could not be read."""
        sound = not self._unsound
        return Sampled(
            prompt_ids=_tuple(self.prompt_ids) if sound else None,
            sampled_ids=_tuple(self.sampled_ids) if sound else None,
            sampled_logprobs=_tuple(self.sampled_logprobs) if sound else None,
            choices=len(self.indices),
            completion_tokens=(usage or {}).get("completion_tokens"),
        )


def _begins(raw: msgspec.Raw, with_byte: int) -> bool:
    """Whether a value is of the kind that the API gives; any other is none of ours to touch."""
    return memoryview(raw)[0] == with_byte


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
