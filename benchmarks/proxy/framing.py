"""Take HTTP/1.1 replies in chunked transfer coding apart (RFC 9112 §7.1; pure)."""

import re
from typing import Final

HEAD_END: Final = b"\r\n\r\n"
CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.IGNORECASE)


class ChunkedReply:
    """Give the content of what comes; `status` once the head is there, `ended` at last."""

    def __init__(self) -> None:
        self.status = 0
        self.ended = False
        self._rest = b""
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        """Return the content in this piece.

        Raises:
            ValueError: this is no reply in chunked coding.
        """
        self._rest += data
        if not self.status and not self._take_head():
            return b""
        content = []
        while self._rest and not self.ended:
            if not self._left and not self._take_size():
                break
            if not self.ended:
                content.append(self._take_content())
        return b"".join(content)

    def _take_head(self) -> bool:
        head, found, rest = self._rest.partition(HEAD_END)
        if found:
            self.status = int(head[9:12])
            if self.status == 200 and not CHUNKED.search(head):
                raise ValueError("a stream that is not in chunked coding")
            self._rest = rest
        return bool(found)

    def _take_size(self) -> bool:
        """Take a size line, and the line end of the chunk before it."""
        line, found, rest = self._rest.removeprefix(b"\r\n").partition(b"\r\n")
        if not found:
            return False
        size = int(line.partition(b";")[0], 16)
        if size == 0:
            # The trailer's empty line belongs to the reply.
            self.ended = rest.startswith(b"\r\n")
            if not self.ended:
                return False
        self._rest, self._left = rest, size
        return True

    def _take_content(self) -> bytes:
        taken = self._rest[: self._left]
        self._rest = self._rest[self._left :]
        self._left -= len(taken)
        return taken
