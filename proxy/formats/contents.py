"""Find the objects in a list that a client sent (pure): messages, and parts of a content."""

from collections.abc import Iterator
from typing import Any


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the members of a list that are objects; nothing if the value is not a list."""
    for member in value if isinstance(value, list) else ():
        if isinstance(member, dict):
            yield member


def blocks_of(content: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Return the blocks of one type in a content, as Anthropic's API and some clients write it."""
    return (block for block in objects(content) if block.get("type") == kind)
