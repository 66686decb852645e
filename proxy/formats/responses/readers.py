"""Read recorded responses for all that the ledger stores of them (pure)."""

from typing import Any

import msgspec

from proxy.formats.base import ReplyFacts
from proxy.formats.responses.replies import (
    StreamedResponse,
    WholeResponse,
    string_of,
    text_of,
    tool_calls_of,
)
from proxy.formats.responses.response_filter import ResponseFilter


class WholeResponseReader(WholeResponse):
    """Read a response in one piece."""

    def read(self, raw: bytes) -> None:
        """Take the reply's bytes."""
        self.feed(raw)

    def facts(self) -> ReplyFacts:
        """Return the response's facts."""
        return _facts(self._response, self._filter, whole=self._whole)


class StreamedResponseReader(StreamedResponse):
    """Read a response's events."""

    def read(self, raw: bytes) -> None:
        """Take the reply's bytes."""
        self.feed(raw)

    def facts(self) -> ReplyFacts:
        """Return the facts of the response in the newest event that carries it."""
        return _facts(self._response, self._filter, whole=self.ended)


def _facts(response: dict[str, Any] | None, filtered: ResponseFilter, *, whole: bool) -> ReplyFacts:
    if response is None:
        return ReplyFacts(None, None, None, None, (), filtered.sampled(None), whole)
    usage = response.get("usage") if isinstance(response.get("usage"), dict) else None
    return ReplyFacts(
        reply=msgspec.json.encode(response),
        response_id=string_of(response.get("id")),
        finish=string_of(response.get("status")),
        usage=usage,
        tool_calls=tool_calls_of(response),
        sampled=filtered.sampled(usage),
        whole=whole,
        text=text_of(response),
    )
