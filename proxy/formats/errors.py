"""Format errors for an API, as a reply body or as the event that ends a stream (pure).

OpenAI's form is `{"error": {…}}`, in a stream one more `data:` line (openai-python's
`_streaming.py` raises for any event whose data has `error`). The Responses API has an event `error`
with its fields at the top level, see
https://platform.openai.com/docs/api-reference/responses-streaming/error. Anthropic's form is
`{"type": "error", "error": {"type": …, "message": …}}`, in a stream as event `error`
(https://docs.anthropic.com/en/api/messages-streaming, "Error events").
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec


class ErrorShape:
    """Encoder of errors in OpenAI's form; subclasses encode them for other APIs."""

    # The API's name in the reference.
    api: str = "OpenAI"
    # The line before an event's data.
    event_line: bytes = b""

    def body(
        self,
        message: str,
        kind: str = "server_error",
        param: str | None = None,
        code: str | None = None,
        *,
        status: int | None = None,
    ) -> bytes:
        """Return the body of an error reply that is sent with the HTTP status `status`."""
        return msgspec.json.encode(self._error(message, kind, param, code, status))

    def event(
        self, message: str, kind: str = "server_error", *, status: int | None = None
    ) -> bytes:
        """Return the event that ends a stream with an error.

        `status` is the HTTP status of the same error before a stream has begun, if known.
        """
        error = msgspec.json.encode(self._event(message, kind, status))
        return self.event_line + b"data: %s\n\n" % error

    def _error(
        self, message: str, kind: str, param: str | None, code: str | None, status: int | None
    ) -> dict[str, Any]:
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def _event(self, message: str, kind: str, status: int | None) -> dict[str, Any]:
        return self._error(message, kind, None, None, status)


class ResponsesErrors(ErrorShape):
    """Encoder of errors for the Responses API, whose form differs from OpenAI's in streams only."""

    event_line = b"event: error\n"

    def _event(self, message: str, kind: str, status: int | None) -> dict[str, Any]:
        event: dict[str, Any] = {"type": "error", "code": kind, "message": message, "param": None}
        return event | {"sequence_number": 0}


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
# HTTP statuses of error types, Pawl's and vLLM's
# (`vllm/entrypoints/serve/exception_handling/error_response.py`), for errors in streams, which have
# no status.
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
ERROR_STATUSES: Final = range(400, 600)


class AnthropicErrors(ErrorShape):
    """Encoder of errors for Anthropic's API, where errors have no `param` and no `code`.

    The type is derived from the status or, without an error status, from `kind`.
    """

    api = "Anthropic"
    event_line = b"event: error\n"

    def _error(
        self, message: str, kind: str, param: str | None, code: str | None, status: int | None
    ) -> dict[str, Any]:
        if status not in ERROR_STATUSES:
            status = STATUS_OF_KIND.get(kind, 500)
        assert status is not None
        other = "invalid_request_error" if status < 500 else "api_error"
        error = {"type": ANTHROPIC_BY_STATUS.get(status, other), "message": message}
        return {"type": "error", "error": error}


OPENAI: Final = ErrorShape()
ANTHROPIC: Final = AnthropicErrors()
