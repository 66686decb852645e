"""Check from outside whether the proxy answers, and which models and versions it has."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import aiohttp
import msgspec

from pawl.rollout.tasks import RolloutError

TIMEOUT_S: Final = 5.0
# Pauses between requests while the proxy does not answer, and while runs are under way.
RETRY_S: Final = 2.0
POLL_S: Final = 0.5


class Models(NamedTuple):
    """The names of a proxy's models, and the versions NAME@N that its policies serve.

    `contexts` has the longest context in tokens of each model that states it.
    """

    names: frozenset[str]
    serving: tuple[str, ...]
    contexts: Mapping[str, int] = {}

    def has(self, model: str) -> bool:
        """Return whether the model can be requested; `NAME@0` is the base model NAME."""
        policy = model.removesuffix("@0")
        return policy in self.names or policy in [name.rpartition("@")[0] for name in self.serving]


class ProxyClient:
    """A client of one proxy; `url` is the address of its data port."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._last_away_at = float("-inf")

    async def models(self) -> Models:
        """Return the models that can be requested now.

        Raises:
            RolloutError: no proxy answers at the URL, it refuses our key, or its model server is
                away.
        """
        # Pawl ignores the prefix `/task/rollout` here; other servers do not know this path.
        status, headers, body = await self._get(f"{self._url}/task/rollout/v1/models")
        if status == 404:
            raise RolloutError(
                f"--url: {self._url} is not Pawl's proxy: give the address that `pawl proxy` or "
                "`pawl up` prints, without /v1"
            )
        if status in (401, 403):
            raise RolloutError(
                f"the proxy at {self._url} answers {status}: set PAWL_API_KEY to a key for infer, "
                "feedback and read (`pawl keys create NAME --scope infer,feedback,read`)"
            )
        if status >= 500:
            shown = body[:200].decode(errors="replace")
            raise RolloutError(f"the proxy at {self._url} answers {status}: {shown}")
        try:
            listed = msgspec.json.decode(body)["data"]
            stated = {one["id"]: one.get("max_model_len") for one in listed}
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            stated = {}
        contexts = {name: n for name, n in stated.items() if isinstance(n, int) and n > 0}
        serving = tuple(filter(None, headers.get("x-pawl-policy", "").split(", ")))
        return Models(frozenset(stated), serving, contexts)

    async def has(self, model: str) -> bool:
        """Return whether this model can be requested; true if the proxy does not answer."""
        try:
            return (await self.models()).has(model)
        except RolloutError:
            return True

    async def _get(self, url: str) -> tuple[int, Mapping[str, str], bytes]:
        try:
            async with asyncio.timeout(TIMEOUT_S), self._session.get(url) as reply:
                return reply.status, reply.headers, await reply.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise RolloutError(
                f"no proxy answers at {self._url} ({error or type(error).__name__}): start it with "
                "`pawl up`, or say with --url where it is"
            ) from error

    async def answers(self) -> bool:
        """Return whether the proxy and the model server behind it answer."""
        with suppress(RolloutError):
            if (await self._get(f"{self._url}/v1/models"))[0] < 500:
                return True
        self._last_away_at = asyncio.get_running_loop().time()
        return False

    async def answered_since(self, start: float) -> bool:
        """Return whether the proxy answers, and did at each poll since `start` (loop's clock)."""
        return await self.answers() and self._last_away_at < start

    async def wait(self) -> None:
        """Wait until the proxy answers, without a limit."""
        while True:
            if await self.answers():
                return
            await asyncio.sleep(RETRY_S)

    async def watch(self) -> None:
        """Poll the proxy for ever, so that `answered_since` knows when it did not answer."""
        while True:
            await self.answers()
            await asyncio.sleep(POLL_S)
