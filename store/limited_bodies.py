"""Limit the size of responses: a hostile or broken server must not fill Pawl's memory."""

from typing import Final

import aiohttp

# The longest responses are a teacher's log-probabilities, about 80 bytes a token: this allows
# 200,000 tokens.
MOST_BYTES: Final = 16 << 20


class BodyTooLong(aiohttp.ClientPayloadError):
    """A response has more than `MOST_BYTES`, decompressed; the rest was not read."""


class LimitedResponse(aiohttp.ClientResponse):
    """A `response_class` for aiohttp's sessions that raises `BodyTooLong` for a long body."""

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
                    raise BodyTooLong(f"the response has more than {MOST_BYTES >> 20} MiB")
            self._body = bytes(body)
        return await super().read()
