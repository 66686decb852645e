"""State errors in Anthropic's form (pure).

`{"type": "error", "error": {"type": …, "message": …}}`, in a stream as event `error`
(https://docs.anthropic.com/en/api/messages-streaming, "Error events").
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


class AnthropicErrors:
    """State the errors of Anthropic's API."""

    api = "Anthropic"

    def body(
        self,
        message: str,
        kind: str = "server_error",
        param: str | None = None,
        code: str | None = None,
        *,
        status: int | None = None,
    ) -> bytes:
        """Return the body of an error reply; this API has no `param` and no `code`."""
        error = {"type": anthropic_type(status, kind), "message": message}
        value: dict[str, Any] = {"type": "error", "error": error}
        return msgspec.json.encode(value)

    def event(
        self,
        message: str,
        kind: str = "server_error",
        *,
        sequence_number: int = 0,
        status: int | None = None,
    ) -> bytes:
        """Return the event that ends a stream with an error."""
        return b"event: error\ndata: %s\n\n" % self.body(message, kind, status=status)


ANTHROPIC: Final = AnthropicErrors()


def anthropic_type(status: int | None, kind: str | None = None) -> str:
    """Return Anthropic's type of an error with this status; without a status, of this `kind`."""
    if status not in ERRORS:
        status = STATUS_OF_KIND.get(kind or "", 500)
    assert status is not None
    other = "invalid_request_error" if status < 500 else "api_error"
    return ANTHROPIC_BY_STATUS.get(status, other)
