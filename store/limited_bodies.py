"""Limit what Pawl reads of a server's answers: a hostile or broken one must not fill the memory."""

from typing import Final

import aiohttp

# Of the answers that Pawl asks for, the longest are a teacher's log-probabilities: some 80 bytes a
# token, so this is for 200,000 tokens.
MOST_BYTES: Final = 16 << 20


class BodyTooLong(aiohttp.ClientPayloadError):
    """An answer has more than `MOST_BYTES`, decompressed; the rest was not read."""


class LimitedResponse(aiohttp.ClientResponse):
    """Raise `BodyTooLong` for a long body: the `response_class` of aiohttp's sessions."""

    async def read(self) -> bytes:
        """Return the whole body, decompressed.

        Raises:
            BodyTooLong: it is too long.
        """
        if self._body is None:
            body = bytearray()
            async for piece in self.content.iter_any():
                body += piece
                if len(body) > MOST_BYTES:
                    self.close()
                    raise BodyTooLong(f"an answer of more than {MOST_BYTES >> 20} MiB")
            self._body = bytes(body)
        return await super().read()
