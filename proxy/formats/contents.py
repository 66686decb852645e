"""Find texts and objects in a message's content, in whichever form its API writes it (pure)."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

_TEXT_TYPES: Final = ("text", "input_text", "output_text")


def is_text(part: dict[str, Any]) -> bool:
    """Return whether a part of a content is a text."""
    return part.get("type") in _TEXT_TYPES and isinstance(part.get("text"), str)


def texts(content: Any) -> Iterable[str]:
    """Return the texts of a content, which is a string or a list of parts."""
    if isinstance(content, str):
        return (content,)
    return (part["text"] for part in objects(content) if is_text(part))


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the members of a list that are objects; nothing if the value is not a list."""
    for member in value if isinstance(value, list) else ():
        if isinstance(member, dict):
            yield member
