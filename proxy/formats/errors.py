"""State errors in OpenAI's form, which the proxy also uses where no format is spoken (pure).

`{"error": {…}}`, in a stream as one more `data:` line (openai-python, `_streaming.py`, raises for
any event whose data has `error`).
"""

from typing import Final

import msgspec


class OpenAIErrors:
    """State the errors of chat and text completions."""

    api = "OpenAI"

    def body(
        self,
        message: str,
        kind: str = "server_error",
        param: str | None = None,
        code: str | None = None,
        *,
        status: int | None = None,
    ) -> bytes:
        """Return the body of an error reply; it does not repeat its `status`."""
        error = {"message": message, "type": kind, "param": param, "code": code}
        return msgspec.json.encode({"error": error})

    def event(
        self,
        message: str,
        kind: str = "server_error",
        *,
        sequence_number: int = 0,
        status: int | None = None,
    ) -> bytes:
        """Return the event that ends a stream with an error."""
        return b"data: %s\n\n" % self.body(message, kind)


OPENAI: Final = OpenAIErrors()
