"""State errors of the toy API: `{"oops": …}`."""

import msgspec


class ToyErrors:
    """State errors whole, or as an event."""

    api = "Toy"

    def body(
        self,
        message: str,
        kind: str = "server_error",
        param: str | None = None,
        code: str | None = None,
        *,
        status: int | None = None,
    ) -> bytes:
        """Say what happened."""
        return msgspec.json.encode({"oops": message})

    def event(
        self,
        message: str,
        kind: str = "server_error",
        *,
        sequence_number: int = 0,
        status: int | None = None,
    ) -> bytes:
        """Say it at a stream's end."""
        return b"data: %s\n\n" % self.body(message)
