"""Errors in the format of each API, as a whole reply or as an event of a stream (pure).

- Chat and text completions: `{"error": {…}}`, in a stream as one more `data:` line (openai-python,
  `_streaming.py`, raises for any event whose data has `error`).
- Responses: the same as a whole reply; in a stream an event `error` with its fields at the top
  level (https://platform.openai.com/docs/api-reference/responses-streaming/error).
- Messages: `{"type": "error", "error": {"type": …, "message": …}}` in both, in a stream as event
  `error` (https://docs.anthropic.com/en/api/messages-streaming, "Error events").
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

# Anthropic's types by HTTP status (https://docs.anthropic.com/en/api/errors). 408 and 503 are not
# listed there; the types for a late request and a full server fit them best.
ANTHROPIC_BY_STATUS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Statuses of vLLM's types of errors (`vllm/entrypoints/serve/exception_handling/error_response.py`)
# and of ours: an error within a stream comes without a status.
STATUS_OF_KIND: Final[Mapping[str, int]] = {
    "BadRequestError": 400,
    "invalid_request_error": 400,
    "UnprocessableEntityError": 422,
    "AuthenticationError": 401,
    "PermissionDeniedError": 403,
    "NotFoundError": 404,
    "RateLimitError": 429,
    "ServiceUnavailableError": 503,
}
ERRORS: Final = range(400, 600)


def error_body(
    dialect: str,
    message: str,
    kind: str = "server_error",
    param: str | None = None,
    code: str | None = None,
    *,
    status: int | None = None,
) -> bytes:
    """Return the body of an error reply in the format of `dialect`, to be sent with `status`."""
    if dialect == "messages":
        return msgspec.json.encode(_anthropic(message, kind, status))
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def error_event(
    dialect: str,
    message: str,
    kind: str = "server_error",
    *,
    sequence_number: int = 0,
    status: int | None = None,
) -> bytes:
    """Return the event that ends a stream with an error.

    `sequence_number` counts a response's events; no other API has one. `status` is what the error
    would have had before the stream began, where that is known.
    """
    if dialect == "messages":
        error = msgspec.json.encode(_anthropic(message, kind, status))
        return b"event: error\ndata: %s\n\n" % error
    if dialect == "responses":
        event: dict[str, Any] = {"type": "error", "code": kind, "message": message, "param": None}
        event["sequence_number"] = sequence_number
        return b"event: error\ndata: %s\n\n" % msgspec.json.encode(event)
    return b"data: %s\n\n" % error_body(dialect, message, kind)


def anthropic_type(status: int | None, kind: str | None = None) -> str:
    """Return Anthropic's type of an error with this status; without a status, of this `kind`."""
    if status not in ERRORS:
        status = STATUS_OF_KIND.get(kind or "", 500)
    assert status is not None
    other = "invalid_request_error" if status < 500 else "api_error"
    return ANTHROPIC_BY_STATUS.get(status, other)


def _anthropic(message: str, kind: str, status: int | None) -> dict[str, Any]:
    error = {"type": anthropic_type(status, kind), "message": message}
    return {"type": "error", "error": error}
