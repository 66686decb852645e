"""Speak `/v1/responses`: ids by `enable_response_messages`, log-probabilities by `include`.

vLLM's additional values stand in `input_messages`, `output_messages`, `top_logprobs` and in each
text's `logprobs` (`vllm/entrypoints/openai/responses/protocol.py`). They are replaced by what vLLM
sends to clients that did not ask: `null`, and `[]` in a text's deltas.

vLLM gives log-probabilities for texts only. A whole reply with any text has those of all its
tokens; a reply of tool calls alone has none, and a stream lacks those of reasoning, of tool calls
and of the token that ends it. The ids are complete all the same: vLLM gathers them from the engine
itself (`SimpleContext` in its `responses/context.py`). Where log-probabilities are missing none are
recorded, and the trainer computes them (docs/decisions/042-without-log-probabilities.md), under the
mask of a grammar if one held the reply (061-grammars-without-log-probabilities.md).
"""

from typing import Final

import msgspec

from proxy.formats.base import (
    ErrorShape,
    ModelRequest,
    Object,
    ReplyReader,
    SamplingRules,
    StreamTranscript,
    Transcript,
    Turns,
)
from proxy.formats.requests import with_changes
from proxy.formats.responses.errors import ResponsesErrors
from proxy.formats.responses.readers import StreamedResponseReader, WholeResponseReader
from proxy.formats.responses.replies import StreamedResponse, WholeResponse
from proxy.formats.responses.response_filter import IDS, INCLUDE, TOP
from proxy.formats.responses.sampling import ResponsesSampling
from proxy.formats.responses.turns import ResponsesTurns

LOGPROBS: Final = "message.output_text.logprobs"


class ResponsesFormat(msgspec.Struct, frozen=True):
    """Speak OpenAI's Responses API."""

    name: str = "responses"
    title: str = "OpenAI responses"
    path: str = "/v1/responses"
    forwarded: tuple[str, ...] = ()
    errors: ErrorShape = ResponsesErrors()
    turns: Turns = ResponsesTurns()
    sampling: SamplingRules = ResponsesSampling()
    unread: tuple[str, ...] = ()

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Return the request with the version's name and the fields that give ids.

        Nothing is added to a background request, which is answered before anything is sampled.
        """
        fields = request.fields
        included = fields.get(INCLUDE)
        added: Object = {}
        if want_ids and isinstance(included, list | None) and fields.get("background") is not True:
            if fields.get(IDS) is None or fields[IDS] is False:
                added[IDS] = msgspec.Raw(b"true")
            if LOGPROBS not in (included or ()):
                added[INCLUDE] = msgspec.Raw(msgspec.json.encode([*(included or ()), LOGPROBS]))
                # Without `include` the number of alternatives is ignored; with it, too large a
                # number would fail the call.
                if isinstance(fields.get(TOP), int) and fields[TOP] > 0:
                    added[TOP] = msgspec.Raw(b"0")
        return with_changes(request, served_name, added)

    def whole(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> Transcript:
        """Return a transcript of a response in one piece."""
        return WholeResponse(request, served_name)

    def streamed(self, request: ModelRequest, served_name: str | None) -> StreamTranscript:
        """Return a transcript of a response's events."""
        return StreamedResponse(request, served_name)

    def whole_reader(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> ReplyReader:
        """Return a reader of a response in one piece."""
        return WholeResponseReader(request, served_name)

    def stream_reader(self, request: ModelRequest, served_name: str | None) -> ReplyReader:
        """Return a reader of a response's events."""
        return StreamedResponseReader(request, served_name)


RESPONSES: Final = ResponsesFormat()
