"""Providers that litellm knows, in the place of a server: recorded, never trained.

litellm is imported where an upstream wants it, and nowhere else.
"""

import asyncio
import importlib
import importlib.util
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final

import msgspec

from proxy.dialects.choice_replies import DONE
from proxy.errors import BadUpstreams, UpstreamSilent
from proxy.http.client import Torn
from proxy.http.wire import JSON, Headers
from proxy.upstreams.file import UpstreamSpec
from proxy.upstreams.litellm_words import (
    EMBEDDINGS,
    chunk_event,
    read_asked,
    refusal,
    retry_headers,
    status_of,
    whole_reply,
)
from proxy.upstreams.model_server import Reply

LIBRARY: Final = "litellm"
EVENTS: Final = (b"Content-Type", b"text/event-stream; charset=utf-8")


class LitellmUpstream:
    """Requests to one provider."""

    def __init__(self, spec: UpstreamSpec, key: str | None, *, silence_s: float) -> None:
        self.check(spec)
        self._library = _library()
        # The root of what litellm raises; it stands on openai's package.
        self.errors: type[Exception] = importlib.import_module("openai").OpenAIError
        self._spec = spec
        self._silence_s = silence_s
        self._closing: set[asyncio.Task[None]] = set()
        self._always = dict(spec.options)
        if key is not None:
            self._always["api_key"] = key
        if spec.urls:
            self._always["api_base"] = spec.urls[0]

    @staticmethod
    def check(spec: UpstreamSpec) -> None:
        """See to it that litellm is there.

        Raises:
            BadUpstreams: it is not installed.
        """
        if importlib.util.find_spec(LIBRARY) is None:
            raise BadUpstreams(
                f'upstream {spec.name!r}: kind = "litellm", and litellm is not installed here: '
                "pip install 'pawl[litellm]'"
            )

    async def ask(self, method: str, target: str, headers: Headers, body: bytes) -> Reply:
        """See `ModelServer`; a client's own headers are none of the provider's business."""
        asked = read_asked(target.partition("?")[0], body, self._spec.name)
        arguments = asked.arguments | self._always
        arguments |= {"model": self._name(asked.model), "timeout": self._silence_s}
        # Nothing is sent twice (DESIGN §4).
        arguments |= {"max_retries": 0, "num_retries": 0}
        call = self._library.acompletion
        if asked.path == EMBEDDINGS:
            call = self._library.aembedding
        try:
            answer = await call(**arguments)
        except self._library.exceptions.Timeout as error:
            raise UpstreamSilent(
                f"Upstream {self._spec.name!r} gave no reply in time: {error}"[:500],
                code="upstream_silent",
            ) from error
        except self.errors as error:
            return WholeReply(status_of(error), [JSON, *retry_headers(error)], refusal(error))
        if asked.stream:
            return StreamedReply(self, answer, asked.model)
        told = answer.model_dump(mode="json", exclude_none=True)
        return WholeReply(200, [JSON], whole_reply(told, asked.model))

    def _name(self, model: str) -> str:
        return model if self._spec.provider is None else f"{self._spec.provider}/{model}"

    async def fetch(self, target: str, headers: Headers) -> Reply:
        """See `ModelServer`: a model that is claimed is there."""
        model = target.partition("?")[0].removeprefix("/v1/models/")
        return WholeReply(200, [JSON], self._entry(model))

    async def models(self, headers: Headers) -> Mapping[str, msgspec.Raw]:
        """See `ModelServer`: the names that are claimed whole; no provider is asked."""
        return {
            model: msgspec.Raw(self._entry(model))
            for model in self._spec.models
            if not model.endswith("*")
        }

    def _entry(self, model: str) -> bytes:
        entry = {"id": model, "object": "model", "created": 0, "owned_by": self._spec.name}
        return msgspec.json.encode(entry)

    async def gives_ids(self, model: str | None) -> bool:
        """See `ModelServer`: litellm passes none on."""
        return False

    def learn(self, served_names: Iterable[str]) -> None:
        """See `ModelServer`: no adapter is loaded there."""

    async def sweep(self) -> None:
        """See `ModelServer`: litellm keeps its own connections."""

    async def close(self) -> None:
        """Close every connection."""
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._library.close_litellm_async_clients()

    def let_go(self, stream: Any) -> None:
        """Close a stream that nobody wants any more: the provider stops."""
        closing = asyncio.create_task(stream.aclose(), name="pawl-litellm-close")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class WholeReply:
    """A reply in one piece."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        self.status = status
        self.reason = b""
        self.headers = headers
        self._body = body

    def header(self, wanted: bytes) -> bytes | None:
        """See `Reply`."""
        return next((value for name, value in self.headers if name.lower() == wanted), None)

    async def pieces(self) -> AsyncIterator[bytes]:
        """See `Reply`."""
        yield self._body

    async def read(self, limit: int | None = None) -> bytes | None:
        """See `Reply`."""
        return self._body

    @property
    def ended(self) -> bool:
        """See `Reply`."""
        return True

    def unread(self) -> bytes:
        """See `Reply`: what comes in one piece does not break off."""
        return b""

    def close(self) -> None:
        """See `Reply`."""

    def discard(self) -> None:
        """See `Reply`."""
        self.close()


class StreamedReply(WholeReply):
    """A reply as OpenAI's events, each when litellm gives its chunk."""

    def __init__(self, upstream: LitellmUpstream, stream: Any, model: str) -> None:
        super().__init__(200, [EVENTS], b"")
        self._upstream = upstream
        self._stream = stream
        self._model = model
        self._ended = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """See `Reply`."""
        try:
            async for chunk in self._stream:
                told = chunk.model_dump(mode="json", exclude_none=True)
                yield chunk_event(told, self._model)
        except self._upstream.errors as error:
            raise Torn(f"{type(error).__name__}: {error}"[:500]) from error
        self._ended = True
        yield b"data: %s\n\n" % DONE

    async def read(self, limit: int | None = None) -> bytes | None:
        """See `Reply`."""
        return b"".join([piece async for piece in self.pieces()])

    @property
    def ended(self) -> bool:
        """See `Reply`."""
        return self._ended

    def close(self) -> None:
        """See `Reply`."""
        if not self._ended:
            self._upstream.let_go(self._stream)


def _library() -> Any:
    """litellm, told to mind its own business: no prices fetched, nothing printed or sent home."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    library: Any = importlib.import_module(LIBRARY)
    library.suppress_debug_info = True
    library.telemetry = False
    return library
