"""Translate between OpenAI's API and litellm's arguments (pure).

Only fields that OpenAI's API defines become arguments: litellm also takes a server's address, keys
and credential files as arguments, which a client must not choose.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from proxy.errors import BadRequest
from proxy.formats.base import read_request
from proxy.formats.errors import OPENAI

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
REQUIRED: Final[Mapping[str, str]] = {CHAT: "messages", EMBEDDINGS: "input"}
# The client's own notes, recorded with the call. litellm would interpret them itself.
NOTES: Final = frozenset({"metadata"})
# Nulls that OpenAI's replies always have; litellm's have many more.
NULLS: Final[Mapping[str, tuple[str, ...]]] = {
    "choice": ("finish_reason", "logprobs"),
    "message": ("content",),
}
RETRY: Final = ("retry-after", "retry-after-ms")


class Asked(msgspec.Struct, frozen=True):
    """Hold a request as litellm's arguments."""

    path: str
    model: str
    stream: bool
    arguments: dict[str, Any]


def read_asked(path: str, body: bytes, upstream: str) -> Asked:
    """Return the arguments for a request's body; `upstream` names the table in messages.

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
    if REQUIRED[path] not in request.fields:
        raise BadRequest(f"{REQUIRED[path]} is missing", param=REQUIRED[path])
    unknown = sorted(request.fields.keys() - fields - NOTES)
    if unknown:
        raise BadRequest(
            f"{unknown[0]} is not a field that upstream {upstream!r} passes on through "
            "litellm; leave it out, or set it in the upstream's options",
            param=unknown[0],
            code="unknown_parameter",
        )
    if any(isinstance(tool, dict) and tool.get("type") == "mcp" for tool in _tools(request.fields)):
        # litellm would call the MCP server from this machine, with its network access.
        raise BadRequest(
            "tools: a tool of type mcp is not passed on, because litellm would call its server "
            "from the proxy's machine; use functions, or the server's own client",
            param="tools",
        )
    given = {
        name: value
        for name, value in request.fields.items()
        if value is not None and name not in NOTES and name != "model"
    }
    return Asked(path, request.model, request.stream, given)


def _tools(fields: Mapping[str, Any]) -> list[Any]:
    tools = fields.get("tools")
    return tools if isinstance(tools, list) else []


def whole_reply(reply: dict[str, Any], model: str) -> bytes:
    """Return a reply in one piece, under the model's name that the client used."""
    for choice in reply.get("choices", ()):
        _with_nulls(choice, "choice")
        _with_nulls(choice.get("message"), "message")
    return msgspec.json.encode(reply | {"model": model})


def chunk_event(chunk: dict[str, Any], model: str) -> bytes:
    """Return a chunk as an event of a stream."""
    choices = [choice for choice in chunk.get("choices", ()) if not _is_filler(choice, chunk)]
    for choice in choices:
        _with_nulls(choice, "choice")
    return b"data: %s\n\n" % msgspec.json.encode(chunk | {"model": model, "choices": choices})


def _is_filler(choice: dict[str, Any], chunk: dict[str, Any]) -> bool:
    """Return whether a choice is only there because litellm sends one with the usage.

    In OpenAI's API the usage comes with no choice (API reference, `stream_options`).
    """
    return "usage" in chunk and not choice.get("delta") and choice.get("finish_reason") is None


def _with_nulls(holder: dict[str, Any] | None, kind: str) -> None:
    for name in NULLS[kind] if holder is not None else ():
        assert holder is not None
        holder.setdefault(name, None)


def status_of(error: object) -> int:
    """Return the HTTP status of a provider's error; 502 if it has none."""
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) and 400 <= status < 600 else 502


def refusal(error: Exception) -> bytes:
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
    """Return the headers that say when the provider wants to be asked again."""
    headers = getattr(error, "litellm_response_headers", None)
    values = [(name, headers.get(name)) for name in RETRY] if headers is not None else []
    return [(name.encode(), str(value).encode()) for name, value in values if value is not None]


def _text(value: object) -> str | None:
    return None if value is None else str(value)
