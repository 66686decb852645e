"""Tell `/feedback` what became of each run, as often as it takes."""

import asyncio
from hashlib import sha256
from typing import Final

import aiohttp
import msgspec

from pawl.judging.desk import REFUSED, STATED_BEFORE, TAKEN
from pawl.rollout.errors import Refused
from pawl.rollout.journal import Finished

ONE_POST_S: Final = 10.0
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0


class Desk:
    """Post statements to `/feedback` until they are taken, across restarts of the proxy.

    Attributes:
        away: why the last post was not taken; None if it was.
        taken: how many posts were taken.
        seen: how many of them were about an episode of which the proxy had a call already.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        """Store the URL of `/feedback`."""
        self._session = session
        self._url = url
        self.away: str | None = None
        self.taken = 0
        self.seen = 0

    async def tell(self, finished: Finished) -> None:
        """Post an attempt's statements; told twice under one key, they are stated once.

        Raises:
            Refused: `/feedback` refuses them for what they say.
        """
        body = msgspec.json.encode(finished.statements)
        # The same at each try, also after the runner was killed: a journal keeps the statements.
        key = "rollout-" + sha256(finished.episode.encode() + b"\0" + body).hexdigest()
        pause = FIRST_PAUSE_S
        while (trouble := await self._try(body, key)) is not None:
            self.away = trouble
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        self.away = None

    async def _try(self, body: bytes, key: str) -> str | None:
        """Post once; return None if that succeeded, else the reason why it did not."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        try:
            async with (
                asyncio.timeout(ONE_POST_S),
                self._session.post(self._url, data=body, headers=headers) as reply,
            ):
                text = await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"{self._url} does not answer: {error or type(error).__name__}"
        if reply.status in TAKEN or reply.status == STATED_BEFORE:
            self.taken += 1
            self.seen += reply.status == 200
            return None
        shown = text[:300].decode(errors="replace")
        if reply.status in REFUSED:
            raise Refused(f"/feedback answered {reply.status}: {shown}")
        return f"{self._url} answered {reply.status}: {shown}"
