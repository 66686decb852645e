"""State errors of the Responses API: OpenAI's if whole, an event of their own in a stream (pure).

In a stream it is an event `error` with its fields at the top level
(https://platform.openai.com/docs/api-reference/responses-streaming/error).
"""

from typing import Any

import msgspec

from proxy.formats.errors import OpenAIErrors


class ResponsesErrors(OpenAIErrors):
    """State the errors of responses."""

    def event(
        self,
        message: str,
        kind: str = "server_error",
        *,
        sequence_number: int = 0,
        status: int | None = None,
    ) -> bytes:
        """Return the event that ends a stream with an error."""
        event: dict[str, Any] = {"type": "error", "code": kind, "message": message, "param": None}
        event["sequence_number"] = sequence_number
        return b"event: error\ndata: %s\n\n" % msgspec.json.encode(event)
