"""State errors in the form of an API, whole or as the event that ends a stream (pure).

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
    """State errors in OpenAI's form; other APIs' forms are subclasses."""

    # Whose form it is, as the reference names it.
    api: str = "OpenAI"
    # What stands before the data of an event.
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
        """Return the body of an error reply, to be sent with `status`."""
        return msgspec.json.encode(self._error(message, kind, param, code, status))

    def event(
        self, message: str, kind: str = "server_error", *, status: int | None = None
    ) -> bytes:
        """Return the event that ends a stream with an error.

        `status` is what the error would have had before the stream began, where that is known.
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
    """State the errors of responses, which have a form of their own in a stream."""

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
ERROR_STATUSES: Final = range(400, 600)


class AnthropicErrors(ErrorShape):
    """State the errors of Anthropic's API, which has no `param` and no `code`.

    An error's type follows its status; without one, its kind.
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
