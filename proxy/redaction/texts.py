"""Replace what patterns find in the texts of a JSON document, and leave all else as it is (pure).

The document is never parsed as a whole: each of its strings is looked at in its place, names of
members included, so that numbers of any size stay as they were written. A string that holds JSON
itself, as the arguments of a tool call do, is looked at inside, too.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

# Possessive: a text of any length is passed over once.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_OPENS: Final = (b"{", b"[")
# JSON within a string of JSON, as deep as that is looked at.
DEEPEST: Final = 4


class Finder(Protocol):
    """Find a regular expression in bytes of UTF-8, in a time that is linear in their number."""

    def search(self, text: bytes) -> Any:
        """Return the first match, or None."""

    def finditer(self, text: bytes) -> Iterator[Any]:
        """Return all matches that do not overlap, from the left."""


class Pattern(NamedTuple):
    """Say what is replaced: `instead` is UTF-8, and takes the place of each match."""

    name: str
    finder: Finder
    instead: bytes


class Patterns:
    """Redact texts by several patterns, in their order."""

    def __init__(self, patterns: Sequence[Pattern], any_of: Finder) -> None:
        """Store the patterns; `any_of` finds what any of them does."""
        self._patterns = patterns
        self._any_of = any_of

    def text(self, text: bytes, hits: set[str]) -> bytes:
        """Return a text without what the patterns find, whose names are added to `hits`."""
        if not self._patterns or self._any_of.search(text) is None:
            return text
        for name, finder, instead in self._patterns:
            pieces, end = [], 0
            for match in finder.finditer(text):
                pieces += [text[end : match.start()], instead]
                end = match.end()
            if pieces:
                hits.add(name)
                text = b"".join([*pieces, text[end:]])
        return text

    def document(self, document: bytes, hits: set[str], depth: int = 0) -> bytes:
        """Return a JSON document without what the patterns find in its strings."""
        if not self._patterns:
            return document
        return _STRING.sub(lambda match: self._string(match.group(), hits, depth), document)

    def _string(self, literal: bytes, hits: set[str], depth: int) -> bytes:
        text = _decoded(literal)
        inner = text
        if depth < DEEPEST and text.lstrip().startswith(_OPENS):
            inner = self.document(text, hits, depth + 1)
        redacted = self.text(inner, hits)
        return literal if redacted == text else _encoded(redacted)


def _decoded(literal: bytes) -> bytes:
    """Return the text of a JSON string, in UTF-8; a lone surrogate is kept as three bytes."""
    if b"\\" not in literal:
        return literal[1:-1]
    try:
        text = json.loads(literal, strict=False)
    except ValueError:
        # Two quotes in what only looks like JSON. The text around it is looked at as well.
        return literal[1:-1]
    return str(text).encode(errors="surrogatepass")


def _encoded(text: bytes) -> bytes:
    """Return a text as a JSON string; bytes that are not UTF-8 become U+FFFD."""
    try:
        decoded = text.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        decoded = text.decode(errors="replace")
    return json.dumps(decoded).encode()
