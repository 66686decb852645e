"""Define the interface of whatever answers for a model: a server, or a library in its place."""

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Protocol

import msgspec

from proxy.http.wire import Headers


class Reply(Protocol):
    """Give a reply whose head has come; its body may still be on its way."""

    @property
    def status(self) -> int:
        """Return the HTTP status."""

    @property
    def reason(self) -> bytes:
        """Return the reason phrase beside the status."""

    @property
    def headers(self) -> Headers:
        """Return the headers as they came."""

    def header(self, wanted: bytes) -> bytes | None:
        """Return a header's value, or None; `wanted` is its name in lower case."""

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes.

        Raises:
            Torn: the body broke off.
        """

    async def read(self, limit: int | None = None) -> bytes | None:
        """Return the whole body, or None once it is longer than `limit` bytes.

        Raises:
            Torn: the body broke off.
        """

    @property
    def ended(self) -> bool:
        """Return whether the whole body has come and was taken."""

    def unread(self) -> bytes:
        """Return the bytes of a torn body that came and were not taken."""

    def close(self) -> None:
        """Release the reply; if it has not ended, its sender is told to stop."""

    def discard(self) -> None:
        """Release the reply and close what it came over, ended or not."""


class ModelServer(Protocol):
    """Answer requests for some models."""

    async def ask(self, method: str, target: str, headers: Headers, body: bytes) -> Reply:
        """Send a request with its whole body, and return the reply once its head has come.

        Raises:
            UpstreamUnreachable: nothing of the request was sent.
            UpstreamBroke: the request was sent, and no reply came.
            BadRequest: this upstream cannot express the request.
        """

    async def ask_where_served(
        self, model: str, method: str, target: str, headers: Headers, body: bytes
    ) -> Reply | None:
        """Do what `ask` does at a server that lists `model` now; return None if none does.

        Raises:
            UpstreamBroke: the request was sent, and no reply came.
        """

    async def fetch(self, target: str, headers: Headers) -> Reply:
        """Send a GET request; it raises what `ask` raises."""

    async def models(self, headers: Headers) -> Mapping[str, msgspec.Raw]:
        """Return the entries of its list at `/v1/models`, by id.

        Raises:
            UpstreamUnreachable: it cannot be reached now.
            UpstreamBroke: no list came, or it could not be read.
            NoModels: it refuses to list its models.
        """

    async def gives_ids(self, model: str | None) -> bool:
        """Return whether it gives the token ids of `model`."""

    def learn(self, served_names: Iterable[str]) -> None:
        """Remember the names of adapters that our own trainer loaded there."""

    async def sweep(self) -> None:
        """Close what has been idle or silent for too long, again and again; never return."""

    async def close(self) -> None:
        """Close every connection."""
