"""The one client session to the model server, and what is known of that server."""

import asyncio
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Final, Self

import aiohttp
import msgspec
import structlog
from multidict import CIMultiDict
from yarl import URL

from proxy.errors import UpstreamUnreachable

log = structlog.get_logger()

# RFC 9110 §7.6.1: these belong to one connection and are never passed on.
HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# vLLM closes idle connections after 5 s; one that is reused must be younger.
KEEPALIVE_S: Final = 3.0
CONNECT_S: Final = 10.0
ENGINE: Final = "vllm"


class Upstream:
    """Requests to the model server: no limit on connections, no total time, no redirects."""

    def __init__(self, base_url: str) -> None:
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._gives_ids: dict[str, bool] = {}
        self._looking = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            max_line_size=65536,
            max_field_size=65536,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    def url(self, path: str, query: str = "") -> URL:
        """The upstream's URL for a let-through path, not normalised in any way."""
        return URL(f"{self._root}{path}" + (f"?{query}" if query else ""), encoded=True)

    async def open(
        self, method: str, url: URL, headers: CIMultiDict[str], body: object
    ) -> aiohttp.ClientResponse:
        """Send a request and return its response as soon as its headers are there.

        Raises:
            UpstreamUnreachable: there was no connection, or it broke before any reply.
        """
        try:
            return await self._session.request(
                method,
                url,
                headers=headers,
                data=body,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UpstreamUnreachable(
                f"The model server at {self._root} did not answer "
                f"({type(error).__name__}). Is it running, and is PAWL_UPSTREAM_URL right?",
                code="upstream_unreachable",
            ) from error

    async def gives_ids(self, model: str | None) -> bool:
        """Whether `model` is served by vLLM, found out by looking at its list of models.

        A server that cannot be asked now is asked again at the next call.
        """
        if model is None:
            return False
        if model not in self._gives_ids:
            async with self._looking:
                if model not in self._gives_ids:
                    await self._look()
        return self._gives_ids.get(model, False)

    async def _look(self) -> None:
        try:
            async with self._session.get(
                self.url("/v1/models"), timeout=aiohttp.ClientTimeout(total=CONNECT_S)
            ) as response:
                listed = msgspec.json.decode(await response.read(), type=_Models)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            log.warning("models_unknown", reason=type(error).__name__)
            return
        self._gives_ids |= {model.id: model.owned_by == ENGINE for model in listed.data}

    def learn(self, served_names: Iterable[str]) -> None:
        """These are adapters that our own trainer loaded: the server is vLLM."""
        self._gives_ids |= dict.fromkeys(served_names, True)


class _Model(msgspec.Struct):
    id: str
    owned_by: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


def request_headers(headers: Mapping[str, str], *, drop: Iterable[str] = ()) -> CIMultiDict[str]:
    """The client's headers as the upstream gets them: less the connection's own and ours."""
    unwanted = {"host", "content-length", *HOP_BY_HOP, *drop, *_named_by_connection(headers)}
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in unwanted and not name.lower().startswith("x-pawl-")
    )


def reply_headers(headers: Mapping[str, str], *, keep_length: bool) -> CIMultiDict[str]:
    """The upstream's headers as the client gets them."""
    unwanted = {*HOP_BY_HOP, *_named_by_connection(headers)}
    if not keep_length:
        unwanted.add("content-length")
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in unwanted
    )


def _named_by_connection(headers: Mapping[str, str]) -> set[str]:
    return {name.strip().lower() for name in headers.get("Connection", "").split(",")}
