"""Takes out of a reply in `choices` what the request's rewriting put in (pure)."""

from typing import Annotated, Any, Final

import msgspec

from proxy.dialects.base import NULL, UNREADABLE, ModelRequest, Object, own_name, value_of
from proxy.trainable import Sampled

IDS: Final = "return_token_ids"
LOGPROBS: Final = "logprobs"
# What reading a reply raises that is not of the API's shape. Such a reply is passed on as it
# came, and its call is not trainable.
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
        self.prompt_ids: list[int] | None = None
        self.sampled_ids: list[int] | None = None
        self.sampled_logprobs: list[float] | None = None
        self.indices: set[int] = set()

    def try_restore(self, parsed: Object) -> list[Object] | None:
        """`restore`, or None for a reply of another shape than the API's: it is passed on as is."""
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
        raw_choices = parsed.get("choices")
        if raw_choices is None or not _begins(raw_choices, ARRAY):
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
            self.prompt_ids = _ids.decode(raw)
        if self.hide_ids:
            holder["prompt_token_ids"] = NULL
        return self.hide_ids

    def _take_choice(self, choice: Object) -> bool:
        """Whether anything of the choice was changed."""
        if self._reading:
            self.indices.add(int(value_of(choice.get("index")) or 0))
        changed = self._take_prompt(choice)
        ids = choice.get("token_ids")
        if ids is not None and _begins(ids, ARRAY):
            if self._reading:
                self.took_ids(_ids.decode(ids))
            if self.hide_ids:
                choice["token_ids"] = NULL
                changed = True
        logprobs = choice.get("logprobs")
        if logprobs is not None and _begins(logprobs, OBJECT):
            if self._reading:
                self.took_logprobs(_logprobs.decode(logprobs))
            if self.hide_logprobs:
                choice["logprobs"] = NULL
                changed = True
        return changed

    def took_ids(self, ids: list[int]) -> None:
        """More ids were sampled."""
        self.sampled_ids = self.sampled_ids or []
        self.sampled_ids += ids

    def took_logprobs(self, logprobs: Logprobs) -> None:
        """With these log-probabilities."""
        self.sampled_logprobs = self.sampled_logprobs or []
        self.sampled_logprobs += logprobs.values()

    def sampled(self, usage: dict[str, Any] | None) -> Sampled:
        """What was gathered."""
        return Sampled(
            prompt_ids=_tuple(self.prompt_ids),
            sampled_ids=_tuple(self.sampled_ids),
            sampled_logprobs=_tuple(self.sampled_logprobs),
            choices=len(self.indices),
            completion_tokens=(usage or {}).get("completion_tokens"),
        )


def _begins(raw: msgspec.Raw, with_byte: int) -> bool:
    """Whether a value is of the kind that the API gives; any other is none of ours to touch."""
    return memoryview(raw)[0] == with_byte


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
