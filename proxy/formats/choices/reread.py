"""Read a recorded event in `choices` again, faster than when it was passed on (pure).

To pass an event on, its values are kept as bytes, taken apart level by level and put together
again. The keeper only needs their contents: for an event of the usual shape one untyped parse gives
these, and one typed parse gives its ids. Any other event is read as the worker reads it.
"""

from typing import Any, Final

import msgspec

from proxy.formats.choices.reply_filter import ODD_SHAPE
from proxy.formats.choices.token_reader import Id, Logprobs, TokenReader
from proxy.formats.choices.words import Said
from store.values.json_limits import nests_too_deep


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: Said | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[Id] | None = None
    token_ids: list[Id] | None = None
    logprobs: Logprobs | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice]
    prompt_token_ids: list[Id] | None = None


_event: Final = msgspec.json.Decoder(dict[str, Any])
_typed: Final = msgspec.json.Decoder(_Event)


def reread(payload: bytes, filtered: TokenReader) -> dict[str, Any] | None:
    """Return the event as the client saw it, and add what is removed from it to `filtered`.

    Return None for an event that is not of the usual shape; then nothing is added.
    """
    if nests_too_deep(payload):
        return None
    try:
        event, typed = _event.decode(payload), _typed.decode(payload)
    except ODD_SHAPE:
        return None
    if not event["choices"] or not all(map(_is_usual, event["choices"])):
        return None
    if filtered.model is not None and "model" in event:
        event["model"] = filtered.model
    _take_prompt(event, typed.prompt_token_ids, filtered)
    for choice, read in zip(event["choices"], typed.choices, strict=True):
        _take_choice(choice, read, filtered)
    return event


def _is_usual(choice: dict[str, Any]) -> bool:
    """Return whether a choice has a non-empty delta or text, and a whole number as index.

    An event with an empty delta may have been dropped.
    """
    says = choice.get("delta", "text" in choice)
    return bool(says) and "message" not in choice and type(choice.get("index", 0)) is int


def _take_prompt(holder: dict[str, Any], ids: list[int] | None, filtered: TokenReader) -> None:
    if ids is not None:
        filtered.prompt_ids = ids
        if filtered.hide_ids:
            holder["prompt_token_ids"] = None


def _take_choice(choice: dict[str, Any], read: _Choice, filtered: TokenReader) -> None:
    filtered.indices.add(read.index)
    _take_prompt(choice, read.prompt_token_ids, filtered)
    if read.token_ids is not None:
        filtered.took_ids(read.token_ids)
        if filtered.hide_ids:
            choice["token_ids"] = None
    if read.logprobs is not None:
        filtered.took_logprobs(read.logprobs)
        if filtered.hide_logprobs:
            choice["logprobs"] = None
