"""Stand in for a model server and a spool, without network and disk: answer as they are told."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from proxy.calls.call import CallParts
from proxy.errors import UpstreamBroke
from proxy.feedback import FeedbackEndpoint, IdempotencyStore, KeyFiles, RecentTargets
from proxy.http.client import Torn
from proxy.http.server import Connection
from proxy.http.wire import Headers
from proxy.identity.call_memory import CallMemory
from proxy.intake import Intake
from proxy.keys import NO_KEYS, KeyChecker
from proxy.policies.versions import Versions
from proxy.spool.segments import CapturedCall, Frame, encode_frame
from proxy.upstreams.upstreams import UpstreamMember, Upstreams
from proxy.worker import data_handler
from store.records import EVAL_TASKS
from tests.support.http_wires import Wire, client
from tests.support.proxy.versions import version

# Longest reply of a data port, in bytes.
MOST = 2**20


class SaidReply:
    """Reply with a given status, head and body; break off at its end where it is `torn`."""

    def __init__(self, status: int, headers: Headers, pieces: list[bytes], *, torn: bool) -> None:
        self.status = status
        self.reason = b"Said"
        self.headers = headers
        self._pieces = list(pieces)
        self._torn = torn

    def header(self, wanted: bytes) -> bytes | None:
        """Return a header's value, or None."""
        return next((value for name, value in self.headers if name.lower() == wanted), None)

    @property
    def fully_read(self) -> bool:
        """Return whether the whole body was read."""
        return not self._pieces and not self._torn

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body, then break off if it is torn."""
        while self._pieces:
            await asyncio.sleep(0)
            if piece := self._pieces.pop(0):
                yield piece
        if self._torn:
            raise Torn("it was said to")

    async def read(self, limit: int | None = None, grown: Any = None) -> bytes | None:
        """Return the whole body."""
        if self._torn:
            raise Torn("it was said to")
        body = self.unread_bytes()
        return None if limit is not None and len(body) > limit else body

    def unread_bytes(self) -> bytes:
        """Return what was not read yet."""
        body, self._pieces = b"".join(self._pieces), []
        return body

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def discard(self) -> None:
        """Do nothing: there is no connection."""


class SaidServer:
    """Give one reply to whatever it is asked; None: break off before one."""

    def __init__(self, make: Any, *, gives: bool) -> None:
        self._make = make
        self._gives = gives
        self.asked: list[bytes] = []

    async def ask(self, method: str, target: str, headers: Headers, body: bytes) -> Any:
        """Note the request, and give the reply."""
        self.asked.append(body)
        reply = self._make()
        if reply is None:
            raise UpstreamBroke("it was said to break")
        return reply

    async def ask_where_served(
        self, model: str, method: str, target: str, headers: Headers, body: bytes
    ) -> Any:
        """Note the request, and give the reply, whichever model it is for."""
        return await self.ask(method, target, headers, body)

    async def fetch(self, target: str, headers: Headers) -> Any:
        """Note the request, and give the reply."""
        return await self.ask("GET", target, headers, b"")

    async def models(self, headers: Headers) -> Mapping[str, msgspec.Raw]:
        """Return one model, `m`."""
        return {"m": msgspec.Raw(b'{"id":"m"}')}

    async def gives_ids(self, model: str | None) -> bool:
        """Return what the test chose."""
        return self._gives

    async def keeps_system(self, model: str) -> bool:
        """Return whether ids are given: any answer will do."""
        return self._gives

    def learn(self, served_names: Iterable[str]) -> None:
        """Do nothing: the reply is the same whatever is served."""

    async def sweep(self) -> None:
        """Do nothing: there are no connections."""

    async def close(self) -> None:
        """Do nothing: there are no connections."""


class Remembered:
    """Take records as `Recorder` does; they must be such that the spool could hold them."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def queue_call(self, record: CapturedCall) -> "asyncio.Future[bool]":
        """Keep the record as the spool would."""
        self._keep(record)
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        future.set_result(True)
        return future

    async def append(self, record: Frame) -> bool:
        """Keep the record, durable at once."""
        self._keep(record)
        return True

    def _keep(self, record: Frame) -> None:
        assert encode_frame(record)
        self.frames.append(record)


class NoDatabase:
    """Stand in for a database that is away."""

    async def ask(self, question: object, *, within_s: float) -> None:
        """Return None: no answer."""


def data_port(
    server: SaidServer, kept: Remembered, intake: Intake, folder: Path
) -> tuple[Connection, Wire]:
    """Connect a client to a worker's whole data port."""
    versions, away = Versions(), NoDatabase()
    versions.replace([version(0, "retired"), version(1, "serving")])
    parts = CallParts(
        Upstreams([UpstreamMember("one", (), True, server)]),
        versions,
        kept,  # type: ignore[arg-type]
        away,  # type: ignore[arg-type]
        intake,
        CallMemory(),
        RecentTargets(),
        MOST,
        EVAL_TASKS,
    )
    keys = IdempotencyStore(KeyFiles(folder), away)  # type: ignore[arg-type]
    feedback = FeedbackEndpoint(kept, parts.targets, away, intake, keys)  # type: ignore[arg-type]
    gate = KeyChecker("anyone")
    gate.replace_keys(NO_KEYS)
    handler = data_handler(parts, feedback, gate, may_delete_models=False)
    return client(handler)
