"""Answer calls through litellm's providers instead of a server: recorded, never trained.

litellm is imported only if an upstream needs it. It gets only the fields of OpenAI's API:
it also takes addresses, keys and credential files as arguments, which a client must not choose.
"""

import asyncio
import importlib
import importlib.util
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from proxy.errors import BadRequest, BadUpstreams, UpstreamSilent
from proxy.formats.base import DONE, read_request
from proxy.formats.errors import OPENAI
from proxy.http.client import Torn
from proxy.http.exchange import Grown
from proxy.http.wire import JSON, Headers
from proxy.upstreams.file import UpstreamSpec
from store import install_command

CHAT: Final = "/v1/chat/completions"
EMBEDDINGS: Final = "/v1/embeddings"

# https://platform.openai.com/docs/api-reference/chat/create, and two fields of other providers.
CHAT_FIELDS: Final = frozenset(
    {
        *("model", "messages", "stream", "stream_options", "audio", "modalities", "prediction"),
        *("max_tokens", "max_completion_tokens", "n", "stop", "seed", "temperature", "top_p"),
        *("frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "top_logprobs"),
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
        *("response_format", "reasoning_effort", "verbosity", "web_search_options"),
        *("user", "safety_identifier", "service_tier", "store"),
        *("prompt_cache_key", "prompt_cache_retention"),
        *("top_k", "thinking"),
    }
)
# https://platform.openai.com/docs/api-reference/embeddings/create
EMBEDDING_FIELDS: Final = frozenset({"model", "input", "dimensions", "encoding_format", "user"})
FIELDS: Final[Mapping[str, frozenset[str]]] = {CHAT: CHAT_FIELDS, EMBEDDINGS: EMBEDDING_FIELDS}
REQUIRED_FIELD: Final[Mapping[str, str]] = {CHAT: "messages", EMBEDDINGS: "input"}
# Fields that are recorded but not passed on: litellm would interpret them itself.
NOT_PASSED_ON: Final = frozenset({"metadata"})
# Fields that OpenAI's replies have even if null; litellm's other nulls are left out.
KEPT_NULLS: Final[Mapping[str, tuple[str, ...]]] = {
    "choice": ("finish_reason", "logprobs"),
    "message": ("content",),
}
RETRY_HEADERS: Final = ("retry-after", "retry-after-ms")


class LitellmRequest(msgspec.Struct, frozen=True):
    """A client's request, as the arguments with which litellm is called."""

    path: str
    model: str
    stream: bool
    arguments: dict[str, Any]


def read_litellm_request(path: str, body: bytes, upstream: str) -> LitellmRequest:
    """Return a request's arguments for litellm; `upstream` is the upstream's name for messages.

    Raises:
        BadRequest: litellm cannot express the request.
    """
    fields = FIELDS.get(path)
    if fields is None:
        ways = " and ".join(FIELDS)
        raise BadRequest(
            f"The models of upstream {upstream!r} are reached through litellm, which answers "
            f"{ways} here, not {path}. Use one of these",
            code="unsupported_api",
        )
    request = read_request(body)
    if request.parsed is None:
        raise BadRequest("The request's body is not a JSON object", code="invalid_json")
    if request.model is None:
        raise BadRequest("model is missing: name one", param="model")
    if REQUIRED_FIELD[path] not in request.fields:
        raise BadRequest(f"{REQUIRED_FIELD[path]} is missing", param=REQUIRED_FIELD[path])
    unknown = sorted(request.fields.keys() - fields - NOT_PASSED_ON)
    if unknown:
        raise BadRequest(
            f"{unknown[0]} is not a field that upstream {upstream!r} passes on through "
            "litellm; leave it out, or set it in the upstream's options",
            param=unknown[0],
            code="unknown_parameter",
        )
    tools = request.fields.get("tools")
    given_tools = tools if isinstance(tools, list) else []
    if any(isinstance(tool, dict) and tool.get("type") == "mcp" for tool in given_tools):
        # litellm would call the MCP server from this machine, with its network access.
        raise BadRequest(
            "tools: a tool of type mcp is not passed on, because litellm would call its server "
            "from the proxy's machine; use functions, or the server's own client",
            param="tools",
        )
    given = {
        name: value
        for name, value in request.fields.items()
        if value is not None and name not in NOT_PASSED_ON and name != "model"
    }
    return LitellmRequest(path, request.model, request.stream, given)


def whole_reply(reply: dict[str, Any], model: str) -> bytes:
    """Return a non-streamed reply as JSON, with the model's name that the client used."""
    for choice in reply.get("choices", ()):
        _with_nulls(choice, "choice")
        _with_nulls(choice.get("message"), "message")
    return msgspec.json.encode(reply | {"model": model})


def chunk_event(chunk: dict[str, Any], model: str) -> bytes:
    """Return a chunk as an event of a stream, with the model's name that the client used."""
    choices = [choice for choice in chunk.get("choices", ()) if not _is_filler(choice, chunk)]
    for choice in choices:
        _with_nulls(choice, "choice")
    return b"data: %s\n\n" % msgspec.json.encode(chunk | {"model": model, "choices": choices})


def _is_filler(choice: dict[str, Any], chunk: dict[str, Any]) -> bool:
    """Return whether a choice is an empty one that litellm sends along with the usage.

    In OpenAI's API the usage comes without a choice (API reference, `stream_options`).
    """
    return "usage" in chunk and not choice.get("delta") and choice.get("finish_reason") is None


def _with_nulls(holder: dict[str, Any] | None, kind: str) -> None:
    for name in KEPT_NULLS[kind] if holder is not None else ():
        assert holder is not None
        holder.setdefault(name, None)


def status_of(error: object) -> int:
    """Return the HTTP status of a provider's error; 502 if it has none."""
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) and 400 <= status < 600 else 502


def provider_error_body(error: Exception) -> bytes:
    """Return a provider's error in OpenAI's format."""
    body = getattr(error, "body", None)
    fields: Mapping[str, Any] = body if isinstance(body, dict) else {}
    message = fields.get("message") or getattr(error, "message", None) or str(error)
    kind, param, code = (
        _text(fields.get(name, getattr(error, name, None))) for name in ("type", "param", "code")
    )
    # litellm appends its own traceback, with this machine's paths, to unexpected errors.
    message = str(message).partition("\nTraceback ")[0]
    return OPENAI.body(message, kind or "upstream_error", param, code)


def retry_headers(error: object) -> list[tuple[bytes, bytes]]:
    """Return the headers in which the provider states when to retry."""
    headers = getattr(error, "litellm_response_headers", None)
    values = [(name, headers.get(name)) for name in RETRY_HEADERS] if headers is not None else []
    return [(name.encode(), str(value).encode()) for name, value in values if value is not None]


def _text(value: object) -> str | None:
    return None if value is None else str(value)


LIBRARY: Final = "litellm"
# Replaces the upstream's key in texts for clients.
HIDDEN_TEXT: Final = "***"
EVENT_STREAM_TYPE: Final = (b"Content-Type", b"text/event-stream; charset=utf-8")


def hidden_words(spec: UpstreamSpec, key: str | None) -> dict[str, str]:
    """Return the words to hide from clients, mapped to their replacements, in order.

    Errors of providers may quote the key, also as part of a URL, and the address, as a whole or
    only host and port.
    """
    places = [place for url in spec.urls for place in (url, urlsplit(url).netloc)]
    return ({key: HIDDEN_TEXT} if key else {}) | dict.fromkeys(places, spec.name)


class LitellmUpstream:
    """Send requests to one provider through litellm."""

    def __init__(self, spec: UpstreamSpec, key: str | None, *, silence_s: float) -> None:
        """Import litellm, and prepare the arguments that each request gets.

        Raises:
            BadUpstreams: litellm is not installed.
        """
        self.check(spec)
        self._library = _library()
        # The base class of litellm's errors, which derive from those of openai's package.
        self.errors: type[Exception] = importlib.import_module("openai").OpenAIError
        self._spec = spec
        self._silence_s = silence_s
        self._closing: set[asyncio.Task[None]] = set()
        self._fixed_arguments = dict(spec.options)
        self._hidden = hidden_words(spec, key)
        if key is not None:
            self._fixed_arguments["api_key"] = key
        if spec.urls:
            self._fixed_arguments["api_base"] = spec.urls[0]

    @staticmethod
    def check(spec: UpstreamSpec) -> None:
        """Check that litellm is installed.

        Raises:
            BadUpstreams: it is not.
        """
        if importlib.util.find_spec(LIBRARY) is None:
            raise BadUpstreams(
                f'upstream {spec.name!r}: kind = "litellm", and litellm is not installed here: '
                f"`{install_command('litellm')}`"
            )

    async def ask(self, method: str, target: str, headers: Headers, body: bytes) -> "LitellmReply":
        """Send a request through litellm; the client's headers are not passed to the provider.

        Raises:
            BadRequest: litellm cannot express the request.
            UpstreamSilent: the provider gave no reply in time.
        """
        request = read_litellm_request(target.partition("?")[0], body, self._spec.name)
        arguments = request.arguments | self._fixed_arguments
        arguments |= {"model": self._name(request.model), "timeout": self._silence_s}
        # No request is sent twice: a model must not answer one call twice.
        arguments |= {"max_retries": 0, "num_retries": 0}
        call = self._library.acompletion
        if request.path == EMBEDDINGS:
            call = self._library.aembedding
        try:
            answer = await call(**arguments)
        except self._library.exceptions.Timeout as error:
            why = self.without_secrets(str(error))
            raise UpstreamSilent(
                f"Upstream {self._spec.name!r} gave no reply in time: {why}"[:500],
                code="upstream_silent",
            ) from error
        except self.errors as error:
            body = self.without_secrets(provider_error_body(error).decode()).encode()
            return LitellmReply(status_of(error), [JSON, *retry_headers(error)], body)
        if request.stream:
            return LitellmStream(self, answer, request.model)
        reply = answer.model_dump(mode="json", exclude_none=True)
        return LitellmReply(200, [JSON], whole_reply(reply, request.model))

    def without_secrets(self, text: str) -> str:
        """Return an error's text without the key and the provider's address."""
        for word, shown in self._hidden.items():
            text = text.replace(word, shown)
        return text

    def _name(self, model: str) -> str:
        return model if self._spec.provider is None else f"{self._spec.provider}/{model}"

    async def ask_where_served(
        self, model: str, method: str, target: str, headers: Headers, body: bytes
    ) -> "LitellmReply":
        """Call `ask`: a provider has no replicas, and no adapter is loaded there."""
        return await self.ask(method, target, headers, body)

    async def fetch(self, target: str, headers: Headers) -> "LitellmReply":
        """Return a list entry for the model in the path, which is assumed to exist."""
        model = target.partition("?")[0].removeprefix("/v1/models/")
        return LitellmReply(200, [JSON], self._entry(model))

    async def models(self, headers: Headers) -> Mapping[str, msgspec.Raw]:
        """Return an entry for each full name in the upstream's `models`; no provider is asked."""
        return {
            model: msgspec.Raw(self._entry(model))
            for model in self._spec.models
            if not model.endswith("*")
        }

    def _entry(self, model: str) -> bytes:
        entry = {"id": model, "object": "model", "created": 0, "owned_by": self._spec.name}
        return msgspec.json.encode(entry)

    async def gives_ids(self, model: str | None) -> bool:
        """Return False: litellm passes no token ids on."""
        return False

    async def keeps_system(self, model: str) -> bool:
        """Return False: requests to litellm are not translated, so it does not matter."""
        return False

    def learn(self, served_names: Iterable[str]) -> None:
        """Do nothing: no adapter is loaded at a provider."""

    async def sweep(self) -> None:
        """Do nothing: litellm manages its own connections."""

    async def close(self) -> None:
        """Wait until abandoned streams are closed, and close litellm's connections."""
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._library.close_litellm_async_clients()

    def close_abandoned(self, stream: Any) -> None:
        """Close a stream whose client went away, so that the provider stops generating."""
        closing = asyncio.create_task(stream.aclose(), name="pawl-litellm-close")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class LitellmReply:
    """A whole reply in memory: a non-streamed reply, or an error."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        self.status = status
        self.reason = b""
        self.headers = headers
        self._body = body

    def header(self, wanted: bytes) -> bytes | None:
        """Return a header's value, or None; `wanted` is its name in lower case."""
        return next((value for name, value in self.headers if name.lower() == wanted), None)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the whole body."""
        yield self._body

    async def read(self, limit: int | None = None, grown: Grown | None = None) -> bytes | None:
        """Return the whole body, whatever the limit: it is in memory already."""
        return self._body

    @property
    def fully_read(self) -> bool:
        """Return True: the body is in memory."""
        return True

    def unread_bytes(self) -> bytes:
        """Return empty bytes: a reply in memory does not break off."""
        return b""

    def close(self) -> None:
        """Do nothing: the reply is in memory."""

    def discard(self) -> None:
        """Close the reply, which has no connection of its own."""
        self.close()


class LitellmStream(LitellmReply):
    """A streamed reply: litellm's chunks, as OpenAI's events, as they come."""

    def __init__(self, upstream: LitellmUpstream, stream: Any, model: str) -> None:
        """Wrap litellm's `stream`; the events get the model's name `model`."""
        super().__init__(200, [EVENT_STREAM_TYPE], b"")
        self._upstream = upstream
        self._stream = stream
        self._model = model
        self._ended = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield an event for each chunk, and `[DONE]` at the end.

        Raises:
            Torn: the provider's stream broke off.
        """
        try:
            async for chunk in self._stream:
                fields = chunk.model_dump(mode="json", exclude_none=True)
                yield chunk_event(fields, self._model)
        except self._upstream.errors as error:
            why = self._upstream.without_secrets(str(error))
            raise Torn(f"{type(error).__name__}: {why}"[:500]) from error
        self._ended = True
        yield b"data: %s\n\n" % DONE

    async def read(self, limit: int | None = None, grown: Grown | None = None) -> bytes | None:
        """Return all events joined."""
        return b"".join([piece async for piece in self.pieces()])

    @property
    def fully_read(self) -> bool:
        """Return whether the provider's stream came to its end."""
        return self._ended

    def close(self) -> None:
        """Close the provider's stream, if it has not ended."""
        if not self._ended:
            self._upstream.close_abandoned(self._stream)


def _library() -> Any:
    """Import litellm, set so that it fetches no prices, prints no hints and sends no telemetry."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    library: Any = importlib.import_module(LIBRARY)
    library.suppress_debug_info = True
    library.telemetry = False
    return library
