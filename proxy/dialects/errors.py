"""Errors in the words of the API that a client speaks, whole or within a stream (pure).

- Chat and text completions: `{"error": {…}}`, and in a stream that as one more `data:` line
  (openai-python, `_streaming.py`: any event whose data has `error` is raised).
- Responses: the same whole; in a stream an event `error` whose fields stand on top
  (https://platform.openai.com/docs/api-reference/responses-streaming/error).
- Messages: `{"type": "error", "error": {"type": …, "message": …}}` both ways, in a stream as
  event `error` (https://docs.anthropic.com/en/api/messages-streaming, "Error events").
"""

from typing import Any, Final

import msgspec

# What our own errors are called there (https://docs.anthropic.com/en/api/errors).
ANTHROPIC_KINDS: Final = {
    "server_error": "api_error",
    "storage_error": "api_error",
    "upstream_error": "api_error",
}


def error_body(
    dialect: str,
    message: str,
    kind: str = "server_error",
    param: str | None = None,
    code: str | None = None,
) -> bytes:
    """A reply's body; `dialect` is one of the ledger's names."""
    if dialect == "messages":
        return msgspec.json.encode(_anthropic(message, kind))
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def error_event(
    dialect: str, message: str, kind: str = "server_error", *, sequence_number: int = 0
) -> bytes:
    """The event that tells a stream's reader that no more comes, and why.

    `sequence_number` counts a response's events; no other API has one.
    """
    if dialect == "messages":
        return b"event: error\ndata: %s\n\n" % msgspec.json.encode(_anthropic(message, kind))
    if dialect == "responses":
        event = {"code": kind, "message": message, "param": None}
        told = {"type": "error", **event, "sequence_number": sequence_number}
        return b"event: error\ndata: %s\n\n" % msgspec.json.encode(told)
    return b"data: %s\n\n" % error_body(dialect, message, kind)


def _anthropic(message: str, kind: str) -> dict[str, Any]:
    kind = ANTHROPIC_KINDS.get(kind, kind)
    return {"type": "error", "error": {"type": kind, "message": message}}
