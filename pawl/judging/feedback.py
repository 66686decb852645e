"""Post statements of a judge or a person to the proxy's `/feedback`, like any other client."""

import asyncio
from collections.abc import Mapping
from typing import Final

import aiohttp
import msgspec

from pawl.judging.answers import Away, JudgeFailed, Statement
from store.settings import parse_address

ACCEPTED_STATUSES: Final = (200, 202)
# The key was used with another body: the judge's earlier answer about the episode counts.
STATED_BEFORE_STATUS: Final = 409
# The statements are at fault, not the proxy. Any other status, such as the 401 of a gateway, may be
# temporary: the statements are kept and posted again.
REFUSED_STATUSES: Final = (400, 413, 422)
PAUSE_S: Final = 0.5
ONE_POST_S: Final = 10.0
SHOWN_BYTES: Final = 300


class FeedbackClient:
    """Post to the proxy's `/feedback`, and retry for a while if there is no answer.

    Attributes:
        trouble: why the last try failed; None if it succeeded.
        accepted: how many posts were accepted, or had been before.
        matched: how many accepted posts were about an episode that the proxy knew already.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        key: Mapping[str, str] | None = None,
        patience_s: float = 10.0,
    ) -> None:
        """Post to `url`, and retry each post for `patience_s` seconds.

        `key` is the header with an API key, for a proxy that needs one.
        """
        self._session = session
        self._key = key or {}
        self._url = url
        self._patience_s = patience_s
        self.trouble: str | None = None
        self.accepted = 0
        self.matched = 0

    async def post(self, statements: list[Statement], key: str) -> None:
        """Post the statements, and retry; with an idempotency `key` used before, change nothing.

        Raises:
            JudgeFailed: `/feedback` refuses the statements.
            Away: `/feedback` does not answer, or answers with an unexpected status.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        while (trouble := await self._try(statements, key)) is not None:
            self.trouble = f"{self._url} {trouble}"
            if loop.time() + PAUSE_S > deadline:
                raise Away(self.trouble)
            await asyncio.sleep(PAUSE_S)
        self.trouble = None

    async def _try(self, statements: list[Statement], key: str) -> str | None:
        """Post once; return None on success, else the reason for a failure that may pass.

        Raises:
            JudgeFailed: `/feedback` refuses the statements.
        """
        try:
            status, text = await post_once(self._session, self._url, statements, key, self._key)
        except Away as error:
            return str(error)
        if status in REFUSED_STATUSES:
            raise JudgeFailed(f"/feedback refused the statements: {text}")
        if status in (*ACCEPTED_STATUSES, STATED_BEFORE_STATUS):
            self.accepted += 1
            self.matched += status == 200
            return None
        return f"answered {status}: {text}"


async def post_once(
    session: aiohttp.ClientSession,
    url: str,
    statements: list[Statement],
    key: str,
    credentials: Mapping[str, str],
) -> tuple[int, str]:
    """Post statements with the idempotency `key`; return the status, and the answer's beginning.

    Raises:
        Away: there is no answer.
    """
    headers = {"Content-Type": "application/json", "Idempotency-Key": key, **credentials}
    body = msgspec.json.encode(statements)
    try:
        async with (
            asyncio.timeout(ONE_POST_S),
            session.post(url, data=body, headers=headers) as reply,
        ):
            return reply.status, (await reply.read())[:SHOWN_BYTES].decode(errors="replace")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Away(f"does not answer: {error or type(error).__name__}") from error


def feedback_url(listen: str) -> str:
    """Return the feedback URL of a proxy that listens on `listen`, for clients on its machine."""
    host, port = parse_address(listen)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/feedback"
