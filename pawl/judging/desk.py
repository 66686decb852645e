"""Posts a judge's statements to /feedback, as anybody posts theirs."""

import asyncio
from typing import Final

import aiohttp
import msgspec

from pawl.judging.answers import Statement
from pawl.judging.errors import Away, JudgeFailed

TAKEN: Final = (200, 202)
# The same judge has said something of this episode before: what it said then stands.
STATED_BEFORE: Final = 409
# The statements are at fault, not the desk.
REFUSED: Final = (400, 413, 422)
PAUSE_S: Final = 0.5
ONE_POST_S: Final = 10.0
SHOWN: Final = 300


class FeedbackDesk:
    """The proxy's /feedback; what does not answer is asked again for `patience_s`."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, patience_s: float = 10.0
    ) -> None:
        self._session = session
        self._url = url
        self._patience_s = patience_s

    async def post(self, statements: list[Statement], key: str) -> None:
        """Have the statements taken; harmless under a key that was used before.

        Raises:
            JudgeFailed: the statements are not as /feedback wants them.
            Away: it does not answer, or not as it should.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        while (trouble := await self._try(statements, key)) is not None:
            if loop.time() + PAUSE_S > deadline:
                raise Away(f"{self._url} {trouble}")
            await asyncio.sleep(PAUSE_S)

    async def _try(self, statements: list[Statement], key: str) -> str | None:
        """What is in the way; None where nothing is."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        body = msgspec.json.encode(statements)
        try:
            async with (
                asyncio.timeout(ONE_POST_S),
                self._session.post(self._url, data=body, headers=headers) as reply,
            ):
                said = (await reply.read())[:SHOWN].decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"does not answer: {error or type(error).__name__}"
        if reply.status in REFUSED:
            raise JudgeFailed(f"/feedback refused its answer: {said}")
        if reply.status in (*TAKEN, STATED_BEFORE):
            return None
        return f"answered {reply.status}: {said}"
