"""Follow server-sent events (WHATWG HTML §9.2) line by line (pure).

Every complete line leaves at once. An unfinished line waits for its end. A `data:` line that cannot
be read by itself waits for the rest of its event, for it may be a part of the event's data. From
the line that ends a reply on, bytes are held back until the record is durable.
"""

from collections.abc import Callable
from typing import Final

BOM: Final = b"\xef\xbb\xbf"
DATA: Final = b"data:"
EVENT: Final = b"event:"
LF: Final = 10
CR: Final = 13


class Lines:
    """Split a stream into lines at LF, CR or both (WHATWG HTML §9.2.6), each as soon as it ends.

    A CR that is the last byte so far may be half of a line's end: it waits for the next byte.
    """

    def __init__(self) -> None:
        """Begin before the first line."""
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
        """Return the bytes of an unfinished line, and forget them."""
        rest = b"".join(self._partial)
        self._partial = []
        return rest


class Unread(Exception):
    """Report a payload that is not a JSON object; it may be one line of an event with several."""


class EventStream:
    """Split a stream into events, hand their data on to be rewritten, and hold back the end.

    `on_data` returns the payload to pass on (the same object if nothing changed), or None to drop
    the event; it raises `Unread` for data that it cannot parse. `hide` removes from such data what
    no client may see. `is_end` recognises a reply's last event by its first line.
    """

    def __init__(
        self,
        on_data: Callable[[bytes], bytes | None],
        hide: Callable[[bytes], bytes],
        is_end: Callable[[bytes], bool],
    ) -> None:
        """Begin before the first event."""
        self._on_data = on_data
        self._hide = hide
        self._is_end = is_end
        self._lines = Lines()
        # An event whose first line of data could not be read by itself, from that line on.
        self._open: list[bytes] = []
        self._held: list[bytes] = []
        self._holding = False
        self._skip_blank = False
        # The number of events whose data could not be parsed.
        self.unread = 0
        self.ended = False
        # The event that ends the reply has come whole.
        self.at_end = False

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes as they came, and return those that may leave at once."""
        leaving: list[bytes] = []
        for line in self._lines.feed(chunk):
            if not self.ended and self._is_end(line):
                self.ended = self._holding = True
                self.at_end = line.startswith(DATA)
            (self._held if self._holding else leaving).append(self._line(line))
        return b"".join(leaving)

    def release(self) -> bytes:
        """Return what was held back; whatever follows the end leaves as it comes."""
        held = b"".join(self._held)
        self._held, self._holding = [], False
        return held

    def finish(self) -> bytes:
        """Return what was held back, including an unfinished event."""
        rest = self._lines.rest()
        if rest:
            self.ended = self.ended or self._is_end(rest)
            self._held.append(self._cut(rest))
        elif self._open:
            self._held.append(self._dispatch(b""))
        return self.release()

    def _line(self, line: bytes) -> bytes:
        if self._open:
            return self._more(line)
        if not line.startswith(DATA):
            return self._other(line)
        payload = line[5:].strip()
        try:
            out = self._on_data(payload)
        except Unread:
            self._open.append(line)
            return b""
        if out is payload:
            return line
        if out is None:
            self._skip_blank = True
            return b""
        return line.replace(payload, out, 1)

    def _other(self, line: bytes) -> bytes:
        if line == b"\n" or not line.strip():
            self.at_end = self.ended
            skip, self._skip_blank = self._skip_blank, False
            return b"" if skip else line
        if line[0] == BOM[0] and line.startswith(BOM):
            # A stream may begin with a byte order mark, which is no part of the first line.
            return BOM + self._line(line[len(BOM) :])
        # Lines of other fields carry no data. But a reader that knows fewer kinds of line ends
        # may take a part of one for data.
        return line if line.startswith(EVENT) else self._hide(line)

    def _more(self, line: bytes) -> bytes:
        if line.strip():
            self._open.append(line)
            return b""
        self.at_end = self.ended
        return self._dispatch(line)

    def _dispatch(self, blank: bytes) -> bytes:
        """Return an event whose data is on several lines, as it leaves."""
        lines, self._open = self._open, []
        data = _joined(lines)
        try:
            out = self._on_data(data)
        except Unread:
            self.unread += 1
            out = self._hide(data)
        lines = [line if _is_data(line) else self._hide(line) for line in lines]
        if out is None:
            return b"".join(line for line in lines if not _is_data(line))
        return _with_data(lines, data, out) + blank

    def _cut(self, rest: bytes) -> bytes:
        """Return an event that was cut off: it is passed on without a call of `on_data`."""
        if rest.startswith(BOM):
            return BOM + self._cut(rest[len(BOM) :])
        lines = [line if _is_data(line) else self._hide(line) for line in [*self._open, rest]]
        self._open, data = [], _joined(lines)
        return _with_data(lines, data, self._hide(data))


def _joined(lines: list[bytes]) -> bytes:
    return b"\n".join(_data_of(line) for line in lines if _is_data(line))


def _with_data(lines: list[bytes], data: bytes, out: bytes) -> bytes:
    """Return an event's lines, with `out` in place of their `data` if the two differ."""
    if out == data:
        return b"".join(lines)
    first = next(line for line in lines if _is_data(line))
    end = first[len(first.rstrip(b"\r\n")) :]
    rewritten = [DATA + b" " + part + end for part in out.split(b"\n")]
    return b"".join(rewritten + [line for line in lines if not _is_data(line)])


def _is_data(line: bytes) -> bool:
    """Return whether a line is of the field `data`, which may stand without a colon."""
    return line.startswith(DATA) or line.rstrip(b"\r\n") == b"data"


def _data_of(line: bytes) -> bytes:
    value = line[5:].rstrip(b"\r\n")
    return value[1:] if value.startswith(b" ") else value


def is_done(line: bytes) -> bool:
    """Return whether this is OpenAI's end marker, `data: [DONE]`."""
    return b"[DONE]" in line and line.startswith(DATA) and line[5:].strip() == b"[DONE]"
