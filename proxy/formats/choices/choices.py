"""Rewrite requests for chat and text completions, and name the readers of their replies (pure).

`return_token_ids`, `logprobs` and the version's name as `model` are added to a request. In the
reply the resulting values are set to `null` again, as vLLM sends them to clients that did not ask,
the model's name is put back, and the extra chunks that carry nothing but ids are dropped.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from proxy.formats.base import (
    ErrorShape,
    ModelRequest,
    ReplyReader,
    SamplingRules,
    StreamTranscript,
    Transcript,
    Turns,
)
from proxy.formats.choices.readers import StreamReader, WholeReader
from proxy.formats.choices.replies import StreamedReply, WholeReply
from proxy.formats.errors import OPENAI
from proxy.formats.json_parts import Object
from proxy.formats.requests import with_changes


class ChoicesFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Speak chat completions or text completions.

    `wanted` are the fields that make vLLM send ids and log-probabilities. `asked` returns whether a
    client's own value of such a field is kept. `spoilt` returns whether a request must get none of
    them: vLLM would then answer it differently, or accept what it refuses without them.
    """

    name: str
    title: str
    path: str
    reply_object: str
    turns: Turns
    sampling: SamplingRules
    unread: tuple[str, ...]
    wanted: Mapping[str, msgspec.Raw]
    asked: Callable[[str, Any], bool]
    spoilt: Callable[[Mapping[str, Any]], bool]
    errors: ErrorShape = OPENAI
    forwarded: tuple[str, ...] = ()

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Return the request with the version's name and those `wanted` fields that it lacks."""
        fields = request.fields
        want_ids = want_ids and not self.spoilt(fields)
        added: Object = {
            field: value
            for field, value in self.wanted.items()
            if want_ids and not self.asked(field, fields.get(field))
        }
        return with_changes(request, served_name, added)

    def whole(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> Transcript:
        """Return a transcript of a whole completion."""
        return WholeReply(request, served_name)

    def streamed(self, request: ModelRequest, served_name: str | None) -> StreamTranscript:
        """Return a transcript of a completion's chunks."""
        return StreamedReply(request, served_name)

    def whole_reader(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> ReplyReader:
        """Return a reader of a whole completion."""
        return WholeReader(request, served_name)

    def stream_reader(self, request: ModelRequest, served_name: str | None) -> ReplyReader:
        """Return a reader of a completion's chunks."""
        return StreamReader(request, served_name, self.reply_object)
