"""Server-sent events (WHATWG HTML §9.2), followed line by line (pure).

Every complete line leaves at once; an unfinished one waits for its end. From the line that
ends a reply on, bytes are held back until the record is durable.
"""

from collections.abc import Callable


class EventStream:
    """Cuts a stream into lines, hands `data:` payloads to be rewritten, holds back the end.

    `on_data` returns the payload to pass on (the same object where nothing changed), or
    None for an event that is not to be passed on. `is_end` knows a reply's last event by
    its first line.
    """

    def __init__(
        self, on_data: Callable[[bytes], bytes | None], is_end: Callable[[bytes], bool]
    ) -> None:
        self._on_data = on_data
        self._is_end = is_end
        self._partial = b""
        self._held: list[bytes] = []
        self._skip_blank = False
        self.ended = False

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes as they came; return those that may leave at once."""
        lines = (self._partial + chunk if self._partial else chunk).split(b"\n")
        self._partial = lines.pop()
        leaving: list[bytes] = []
        for line in lines:
            self.ended = self.ended or self._is_end(line)
            (self._held if self.ended else leaving).append(self._line(line + b"\n"))
        return b"".join(leaving)

    def finish(self) -> bytes:
        """The upstream has ended: what was held back, and what an unfinished line left."""
        self.ended = self.ended or self._is_end(self._partial)
        held = b"".join(self._held) + self._partial
        self._held, self._partial = [], b""
        return held

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:"):
            if line.strip():
                return line
            skip, self._skip_blank = self._skip_blank, False
            return b"" if skip else line
        payload = line[5:].strip()
        out = self._on_data(payload)
        if out is None:
            self._skip_blank = True
            return b""
        return line if out is payload else line.replace(payload, out, 1)


def is_done(line: bytes) -> bool:
    """OpenAI's end marker, `data: [DONE]`."""
    return b"[DONE]" in line and line.startswith(b"data:") and line[5:].strip() == b"[DONE]"
