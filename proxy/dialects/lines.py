"""Cuts bytes that come in any pieces into lines (pure)."""

from typing import Final

LF: Final = 10
CR: Final = 13


class Lines:
    """Gives each line with its end, as soon as that is there: LF, CR or both (WHATWG HTML §9.2.6).

    A CR that is the last byte so far may be half of a line's end: it waits for the next byte.
    """

    def __init__(self) -> None:
        self._partial: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that `chunk` completes."""
        if self._partial and chunk:
            waiting = self._partial[-1][-1] == CR
            self._partial.append(chunk)
            # A line in many pieces is joined once, at its end.
            if not waiting and b"\n" not in chunk and b"\r" not in chunk:
                return []
            chunk = self.rest()
        lines = chunk.splitlines(keepends=True)
        if lines and lines[-1][-1] != LF:
            self._partial.append(lines.pop())
        return lines

    def rest(self) -> bytes:
        """Return what an unfinished line left, and forget it."""
        rest = b"".join(self._partial)
        self._partial = []
        return rest
