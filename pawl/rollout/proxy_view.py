"""Look at the proxy: whether it is there, which versions it has, what it counts."""

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec

from pawl.rollout.errors import RolloutError
from store.tenants import DEFAULT

LOOK_S: Final = 5.0
PAUSE_S: Final = 2.0
GLANCE_S: Final = 0.5
# In the list of models, for keys of other tenants than the default one.
TENANT: Final = "x-pawl-tenant"
# The proxy asks for an API key, or for another one.
ASKS: Final = (401, 403)
VERSION: Final = re.compile(r"(?P<policy>.+)@(?P<number>0|[1-9]\d*)\Z")
CALLS: Final = re.compile(r"^pawl_calls_total\{[^}]*\} (\S+)$", re.MULTILINE)
SERVING: Final = re.compile(r'^pawl_serving_version\{policy="([^"]*)"\} (\S+)$', re.MULTILINE)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Seen(NamedTuple):
    """Hold a reply; `owner` is the tenant whose key was shown."""

    status: int
    body: bytes
    owner: str


class ProxyView:
    """Look at one proxy from outside.

    Attributes:
        calls_a_second: the calls that it recorded lately, of all its clients; None if not known.
        serving: the version that each policy serves, as `NAME@N`, if that is known.
        away_at: when it was last seen not to answer, on the loop's clock; None: never.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, metrics_url: str) -> None:
        """Store the address of its data port, and of its metrics."""
        self._session = session
        self._url = url
        self._metrics_url = metrics_url
        self.calls_a_second: float | None = None
        self.serving: Mapping[str, str] = {}
        self.away_at: float | None = None
        self._last: tuple[float, float] | None = None

    async def check(self, tenant: str | None = None) -> frozenset[str]:
        """Return the names of the models that can be asked for now.

        Raises:
            RolloutError: no proxy answers there, or its model server is away; or the key that is
                shown is not the `tenant`'s.
        """
        # The prefix has no effect on Pawl, and no other server has such a path.
        status, body, owner = await self._get(f"{self._url}/task/rollout/v1/models")
        if status == 404:
            raise RolloutError(
                f"--url: {self._url} is not Pawl's proxy: give the address that `pawl proxy` or "
                "`pawl up` prints, without /v1"
            )
        if status in ASKS:
            raise RolloutError(
                f"the proxy at {self._url} answers {status}: set PAWL_API_KEY to a key for infer, "
                "feedback and read (`pawl keys create NAME --scope infer,feedback,read`)"
            )
        if status >= 500:
            raise RolloutError(
                f"the proxy at {self._url} answers {status}: {body[:200].decode(errors='replace')}"
            )
        if tenant not in (None, owner):
            raise RolloutError(
                f"--tenant is {tenant!r}, and to the proxy at {self._url} these requests are of "
                f"tenant {owner!r}: set PAWL_API_KEY to a key of tenant {tenant!r} (`pawl keys "
                f"create NAME --tenant {tenant}`)"
            )
        with suppress(msgspec.DecodeError):
            return frozenset(model.id for model in msgspec.json.decode(body, type=_Models).data)
        return frozenset()

    async def _get(self, url: str) -> _Seen:
        try:
            async with asyncio.timeout(LOOK_S), self._session.get(url) as reply:
                owner = reply.headers.get(TENANT, DEFAULT)
                return _Seen(reply.status, await reply.read(), owner)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise RolloutError(
                f"no proxy answers at {self._url} ({error or type(error).__name__}): start it with "
                "`pawl up`, or say with --url where it is"
            ) from error

    async def answers(self) -> bool:
        """Return whether the proxy answers, and the model server behind it."""
        status = 0
        with suppress(RolloutError):
            status = (await self._get(f"{self._url}/v1/models")).status
        if 0 < status < 500:
            return True
        self.away_at = asyncio.get_running_loop().time()
        return False

    async def answered_since(self, start: float) -> bool:
        """Return whether the proxy answers, and was not seen away since `start`."""
        return await self.answers() and (self.away_at is None or self.away_at < start)

    async def wait(self) -> None:
        """Wait until the proxy answers."""
        while True:
            if await self.answers():
                return
            await asyncio.sleep(PAUSE_S)

    async def watch(self) -> None:
        """Look for ever whether the proxy answers: so an absence that is over is known."""
        while True:
            await self.answers()
            await asyncio.sleep(GLANCE_S)

    async def read(self) -> None:
        """Read the proxy's metrics for ever; where they cannot be read, nothing is known."""
        while True:
            text = ""
            with suppress(RolloutError):
                seen = await self._get(self._metrics_url)
                text = seen.body.decode(errors="replace") if seen.status == 200 else ""
            self._take(text, asyncio.get_running_loop().time())
            await asyncio.sleep(PAUSE_S)

    def _take(self, text: str, now: float) -> None:
        calls, serving = read_metrics(text)
        if calls is not None and self._last is not None:
            before, then = self._last
            self.calls_a_second = max(0.0, calls - before) / (now - then)
        self._last = None if calls is None else (calls, now)
        self.serving = serving or self.serving


def read_metrics(text: str) -> tuple[float | None, dict[str, str]]:
    """Return the number of calls, and the version that each policy serves, of a page of metrics."""
    counts = [float(value) for value in CALLS.findall(text)]
    serving = {name: f"{name}@{float(version):.0f}" for name, version in SERVING.findall(text)}
    return (sum(counts) if counts else None), serving


def versions_of(policy: str, models: frozenset[str]) -> tuple[str, ...]:
    """Return the versions of a policy that can be asked for, the base model's first.

    Raises:
        RolloutError: there is no such policy.
    """
    numbers = {0} if policy in models else set[int]()
    for model in models:
        match = VERSION.match(model)
        if match is not None and match["policy"] == policy:
            numbers |= {0, int(match["number"])}
    if not numbers:
        known = ", ".join(sorted(models)) or "none"
        raise RolloutError(f"--policy: the proxy has no policy {policy!r}; its models are {known}")
    return tuple(f"{policy}@{number}" for number in sorted(numbers))


def check_policy(policy: str, models: frozenset[str]) -> None:
    """Check that a policy, or a version of one, can be asked for.

    Raises:
        RolloutError: it cannot.
    """
    match = VERSION.match(policy)
    known = versions_of(match["policy"] if match else policy, models)
    if match and policy not in known:
        raise RolloutError(
            f"--policy: {policy} is not loaded; there are {', '.join(known)}. A version that was "
            "retired is loaded again as docs/howto/evaluate.md says"
        )


def only_policy(serving: Mapping[str, Any]) -> str | None:
    """Return the version that serves if there is one policy, for runs that name none."""
    return next(iter(serving.values())) if len(serving) == 1 else None
