"""A model server and a spool without a network and a disk: they say what they are told to."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from proxy.calls.capture import CapturedCall, Frame
from proxy.calls.handler import CallHandler
from proxy.calls.recent import Recent
from proxy.errors import UpstreamBroke
from proxy.feedback.endpoint import FeedbackDesk
from proxy.http.client import Torn
from proxy.http.server import Connection, Server
from proxy.http.wire import Headers
from proxy.idempotency.desk import KeyDesk
from proxy.idempotency.key_files import KeyFiles
from proxy.identity.splits import EVAL_TASKS
from proxy.intake.intake import Intake
from proxy.policies.versions import Versions
from proxy.spool.segments import encode_frame
from proxy.upstreams.members import Member, Upstreams
from proxy.worker import data_handler
from store.records import PolicyVersion
from tests.support.http_wires import Wire

# Longest reply of a data port, in bytes.
MOST = 2**20


class SaidReply:
    """A reply of such a status, head and body; it breaks off at its end where it is `torn`."""

    def __init__(self, status: int, headers: Headers, pieces: list[bytes], *, torn: bool) -> None:
        self.status = status
        self.reason = b"Said"
        self.headers = headers
        self._pieces = list(pieces)
        self._torn = torn

    def header(self, wanted: bytes) -> bytes | None:
        """See `Reply`."""
        return next((value for name, value in self.headers if name.lower() == wanted), None)

    @property
    def ended(self) -> bool:
        """See `Reply`."""
        return not self._pieces and not self._torn

    async def pieces(self) -> AsyncIterator[bytes]:
        """See `Reply`."""
        while self._pieces:
            await asyncio.sleep(0)
            if piece := self._pieces.pop(0):
                yield piece
        if self._torn:
            raise Torn("it was said to")

    async def read(self, limit: int | None = None) -> bytes | None:
        """See `Reply`."""
        if self._torn:
            raise Torn("it was said to")
        body = self.unread()
        return None if limit is not None and len(body) > limit else body

    def unread(self) -> bytes:
        """See `Reply`."""
        body, self._pieces = b"".join(self._pieces), []
        return body

    def close(self) -> None:
        """See `Reply`."""

    def discard(self) -> None:
        """See `Reply`."""


class SaidServer:
    """Gives one reply to whatever it is asked; None: it breaks off before one."""

    def __init__(self, make: Any, *, gives: bool) -> None:
        self._make = make
        self._gives = gives
        self.asked: list[bytes] = []

    async def ask(self, method: str, target: str, headers: Headers, body: bytes) -> Any:
        """See `ModelServer`."""
        self.asked.append(body)
        reply = self._make()
        if reply is None:
            raise UpstreamBroke("it was said to break")
        return reply

    async def ask_where_served(
        self, model: str, method: str, target: str, headers: Headers, body: bytes
    ) -> Any:
        """See `ModelServer`."""
        return await self.ask(method, target, headers, body)

    async def fetch(self, target: str, headers: Headers) -> Any:
        """See `ModelServer`."""
        return await self.ask("GET", target, headers, b"")

    async def models(self, headers: Headers) -> Mapping[str, msgspec.Raw]:
        """See `ModelServer`."""
        return {"m": msgspec.Raw(b'{"id":"m"}')}

    async def gives_ids(self, model: str | None) -> bool:
        """See `ModelServer`."""
        return self._gives

    def learn(self, served_names: Iterable[str]) -> None:
        """See `ModelServer`."""

    async def sweep(self) -> None:
        """See `ModelServer`."""

    async def close(self) -> None:
        """See `ModelServer`."""


class Remembered:
    """Takes records as `Recorder` does; they must be such that the spool could hold them."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def take(
        self, record: CapturedCall, call: str, response_id: str | None
    ) -> "asyncio.Future[bool]":
        """See `Recorder`."""
        self._keep(record)
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        future.set_result(True)
        return future

    async def append(self, record: Frame) -> bool:
        """See `Recorder`."""
        self._keep(record)
        return True

    def _keep(self, record: Frame) -> None:
        assert encode_frame(record)
        self.frames.append(record)


class NoDatabase:
    """A database that is away."""

    async def ask(self, question: object, *, within_s: float) -> None:
        """See `Lookup`."""


def data_port(
    server: SaidServer, kept: Remembered, intake: Intake, folder: Path
) -> tuple[Connection, Wire]:
    """A client's connection to a worker's whole data port."""
    versions, recent, away = Versions(), Recent(), NoDatabase()
    versions.replace([PolicyVersion(**vars_of("m", 0)), PolicyVersion(**vars_of("m@1", 1))])
    relay = CallHandler(
        Upstreams([Member("one", (), True, server)]),
        versions,
        kept,  # type: ignore[arg-type]
        away,  # type: ignore[arg-type]
        intake=intake,
        max_reply=MOST,
        eval_tasks=EVAL_TASKS,
    )
    keys = KeyDesk(KeyFiles(folder), recent, away)  # type: ignore[arg-type]
    desk = FeedbackDesk(kept, recent, away, intake, keys)  # type: ignore[arg-type]
    handler = data_handler(relay, desk, may_delete_models=False)
    connection, wire = Connection(Server(handler)), Wire()
    wire.protocol = connection
    connection.connection_made(wire)
    return connection, wire


def vars_of(served_name: str, version: int) -> dict[str, Any]:
    """A version of the policy `m`; the newest serves."""
    return {
        "name": "m",
        "version": version,
        "state": "serving" if version else "retired",
        "served_name": served_name,
        "adapter_path": None,
        "update_id": None,
    }
