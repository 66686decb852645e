"""What the proxy wants of whatever answers for a model: a server, or a library in its place."""

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Protocol

import msgspec

from proxy.http.wire import Headers


class Reply(Protocol):
    """A reply whose head is there; its body may be, or may be coming."""

    @property
    def status(self) -> int:
        """As HTTP has it."""

    @property
    def reason(self) -> bytes:
        """The phrase beside it."""

    @property
    def headers(self) -> Headers:
        """As they came."""

    def header(self, wanted: bytes) -> bytes | None:
        """A header's value; `wanted` in lower case."""

    def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises:
            Torn: it broke off.
        """

    async def read(self, limit: int | None = None) -> bytes | None:
        """The whole body; None once it is longer than `limit`.

        Raises:
            Torn: it broke off.
        """

    @property
    def ended(self) -> bool:
        """Whether all of it has come, and was taken."""

    def unread(self) -> bytes:
        """Return what lies here of a body that broke off."""

    def close(self) -> None:
        """Let go of it; if it has not ended, who makes it is told to stop."""

    def discard(self) -> None:
        """Let go of it and of what it came over, ended or not."""


class ModelServer(Protocol):
    """Answers requests for some models."""

    async def ask(self, method: str, target: str, headers: Headers, body: bytes) -> Reply:
        """Send a request whose body is at hand; returns once the reply's head is there.

        Raises:
            UpstreamUnreachable: nothing of it was sent.
            UpstreamBroke: it was sent, and no reply came.
            BadRequest: this server has no words for it.
        """

    async def fetch(self, target: str, headers: Headers) -> Reply:
        """GET; see `ask`."""

    async def models(self, headers: Headers) -> Mapping[str, msgspec.Raw]:
        """What it lists at `/v1/models`, by id.

        Raises:
            UpstreamUnreachable, UpstreamBroke: it cannot be asked now.
            NoModels: it does not say.
        """

    async def gives_ids(self, model: str | None) -> bool:
        """Whether token ids can be had of `model` there."""

    def learn(self, served_names: Iterable[str]) -> None:
        """These are adapters that our own trainer loaded there."""

    async def sweep(self) -> None:
        """For ever: let go of what has been idle or silent for too long."""

    async def close(self) -> None:
        """Close every connection."""
